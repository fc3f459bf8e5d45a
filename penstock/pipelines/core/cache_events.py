"""Events of the prefix cache: changes of its index, in which content digests identify the blocks."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class BlocksStored(msgspec.Struct, array_like=True, frozen=True, tag="stored"):
    """Consecutive blocks of a sequence were computed. They are in the prefix index."""

    digests: list[bytes]
    parent: bytes | None
    """The digest of the block before the first of these blocks; None if that one starts the sequence."""
    token_ids: list[int]
    """The tokens of these blocks, concatenated."""
    adapter: str | None = None
    """The LoRA adapter with which the blocks were computed."""


class BlocksRemoved(msgspec.Struct, array_like=True, frozen=True, tag="removed"):
    """Blocks were evicted from the prefix cache."""

    digests: list[bytes]


class BlocksCleared(msgspec.Struct, array_like=True, frozen=True, tag="cleared"):
    """The index is empty: the prefix cache was reset, or its worker has ended."""


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared
