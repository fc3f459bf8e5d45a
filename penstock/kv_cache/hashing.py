"""Computes the digests of KV blocks. A digest covers the tokens of its block and of all earlier blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from penstock.pipelines.core import InputContext, TextAndVisionContext

DIGEST_SIZE = 32  # bytes; long, because after a collision a request would reuse the KV of another prompt


def chain_root(adapter_digest: bytes | None, cache_salt: str | None, regime: int = 0) -> bytes:
    """Return the root of a chain of digests: the parent of the first block's digest.

    Args:
        adapter_digest: the digest of the adapter's content; None without an adapter.
        cache_salt: the salt of the request, if any. Only requests with the same salt share blocks.
        regime: the regime of the sequence's length, see `KVCacheSpec.regime`.
    """
    parts = [adapter_digest, None if cache_salt is None else cache_salt.encode()]
    if regime:
        parts.append(b"%d" % regime)
    return _digest(b"".join(b"-" if part is None else b"%d:%b" % (len(part), part) for part in parts))


def context_root(
    context: InputContext, regime: int, adapter_digest: Callable[[InputContext], bytes] | None
) -> bytes | None:
    """Return the root of a context's digests, or None if its blocks must not be shared.

    The root covers the regime, the cache salt and the digest of the adapter's content. An adapter changes
    keys and values; its name is not hashed, because the name can later refer to another adapter. Contexts
    with an adapter share no blocks if `adapter_digest` is None. Different images can have the same token ids.
    A context with images therefore shares blocks only if ``token_hash_overrides`` identifies the images.
    """
    if isinstance(context, TextAndVisionContext) and not context.identifies_images:
        return None
    if context.adapter is None:
        return chain_root(None, context.cache_salt, regime)
    if adapter_digest is None:
        return None
    return chain_root(adapter_digest(context), context.cache_salt, regime)


def chain_digests(
    parent: bytes,
    tokens: npt.NDArray[np.integer],
    overrides: Mapping[int, int],
    blocks: range,
    block_size: int,
) -> list[bytes]:
    """Return the digests of consecutive full blocks.

    Args:
        parent: the digest of the block before the first of ``blocks``, or the result of `chain_root`.
        tokens: the tokens of the sequence.
        overrides: token index -> the id to hash instead of the token id, such as a hash of an image.
        blocks: indices of the blocks in the sequence.
        block_size: tokens of a block.
    """
    first, stop = blocks.start * block_size, blocks.stop * block_size
    ids = np.ascontiguousarray(tokens[first:stop]).astype("<i8").view("<u8")
    override_offsets: dict[int, list[int]] = {}
    for index in sorted(index for index in overrides if first <= index < stop):
        ids[index - first] = overrides[index] % 2**64
        override_offsets.setdefault(index // block_size, []).append(index % block_size)
    data, bytes_per_block = ids.tobytes(), 8 * block_size
    digests = []
    for offset, block in enumerate(blocks):
        # The positions of overrides are also hashed, so that an override and a token with the same id have
        # different digests.
        offset_bytes = (
            np.array(override_offsets[block], dtype="<u8").tobytes() if block in override_offsets else b""
        )
        block_data = data[offset * bytes_per_block : (offset + 1) * bytes_per_block]
        parent = _digest(parent + block_data + offset_bytes)
        digests.append(parent)
    return digests


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE).digest()
