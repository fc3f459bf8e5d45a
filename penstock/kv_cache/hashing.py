"""The names of blocks by content: each digest stands for a block's tokens and all that came before them."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

DIGEST_SIZE = 32  # bytes; two contents of one name would show one user's prompt to another


def chain_root(adapter_digest: bytes | None, cache_salt: str | None, regime: int = 0) -> bytes:
    """The digest before the first block: contexts share blocks only where these are equal.

    Args:
        adapter_digest: of the adapter's content.
        cache_salt: of the request.
        regime: of the sequence's length, see `KVCacheSpec.regime`.
    """
    parts = [adapter_digest, None if cache_salt is None else cache_salt.encode()]
    if regime:
        parts.append(b"%d" % regime)
    return _digest(b"".join(b"-" if part is None else b"%d:%b" % (len(part), part) for part in parts))


def chain_digests(
    parent: bytes,
    tokens: npt.NDArray[np.integer],
    overrides: Mapping[int, int],
    blocks: range,
    block_size: int,
) -> list[bytes]:
    """The digests of some consecutive full blocks.

    Args:
        parent: the digest of the block before them, or the root.
        tokens: the tokens of the sequence.
        overrides: token index -> the id that stands for it here: an image's content, say, where all images
            have the same token ids.
        blocks: indices of the blocks.
        block_size: tokens a block.
    """
    first, stop = blocks.start * block_size, blocks.stop * block_size
    ids = np.ascontiguousarray(tokens[first:stop]).astype("<i8").view("<u8")
    marks: dict[int, list[int]] = {}
    for index in sorted(index for index in overrides if first <= index < stop):
        ids[index - first] = overrides[index] % 2**64
        marks.setdefault(index // block_size, []).append(index % block_size)
    data, width = ids.tobytes(), 8 * block_size
    digests = []
    for offset, block in enumerate(blocks):
        # An override is no token of the same number: what is overridden is named as well.
        overridden = np.array(marks[block], dtype="<u8").tobytes() if block in marks else b""
        parent = _digest(parent + data[offset * width : (offset + 1) * width] + overridden)
        digests.append(parent)
    return digests


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE).digest()
