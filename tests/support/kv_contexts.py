"""Contexts for tests of the KV cache, and a fake model that writes to the cache.

The "key" of a position is a number that depends on all tokens up to the position, as in a real model. A wrong
number in the cache shows a fault: a block of another context, a stale or overwritten block, or a wrong slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch

from penstock.dtype import DType
from penstock.kernels import KVCacheInputs
from penstock.kv_cache import KVCacheManager, KVCacheSpec, KVGroup
from penstock.pipelines.core import TextContext


def text_context(tokens: Sequence[int], *, max_length: int = 4096, **fields: Any) -> TextContext:
    return TextContext(prompt="", max_length=max_length, tokens=np.array(tokens, np.int64), **fields)


def kv_spec(*windows: int | None, key_limits: tuple[int, ...] = ()) -> KVCacheSpec:
    """Return a spec with one group of one layer for each window."""
    groups = (KVGroup((layer,), 1, 1, DType.float32, window) for layer, window in enumerate(windows))
    return KVCacheSpec(tuple(groups), key_limits)


def kv_manager(
    *num_blocks: int,
    windows: Sequence[int | None] = (None,),
    block_size: int = 4,
    key_limits: tuple[int, ...] = (),
    **options: Any,
) -> KVCacheManager:
    """Return a manager with ``num_blocks`` usable blocks, one number for each group."""
    total = tuple(count + 1 for count in num_blocks)
    return KVCacheManager(kv_spec(*windows, key_limits=key_limits), total, block_size, **options)


def store_and_check_keys(manager: KVCacheManager, contexts: Sequence[TextContext]) -> None:
    """Store the keys of all active tokens. Check the keys that the last active token of each context sees."""
    inputs = manager.inputs(contexts)
    for layer in range(manager.spec.num_layers):
        view = inputs.layer(layer)
        keys = np.concatenate(
            [_expected_keys(manager, context)[context.start_idx : context.active_idx] for context in contexts]
        )
        for tensor in view.cache:
            tensor.view(-1)[view.slots] = torch.from_numpy(keys)
    for row, context in enumerate(contexts):
        assert_keys_readable(manager, inputs, row, context)


def assert_keys_readable(
    manager: KVCacheManager, inputs: KVCacheInputs, row: int, context: TextContext
) -> None:
    """Assert that the last active token sees the expected key at each visible position."""
    assert inputs.lengths[row] == context.active_idx
    last_position = context.active_idx - 1
    for layer in range(manager.spec.num_layers):
        view = inputs.layer(layer)
        first_position = 0 if view.window is None else max(0, last_position - view.window + 1)
        positions = np.arange(first_position, last_position + 1)
        blocks = view.block_tables[row].numpy()[positions // inputs.block_size].astype(np.int64)
        assert blocks.all(), f"the query at {last_position} sees the null block: {blocks.tolist()}"
        slots = blocks * inputs.block_size + positions % inputs.block_size
        for tensor in view.cache:
            np.testing.assert_array_equal(
                tensor.view(-1)[slots].numpy(), _expected_keys(manager, context)[positions]
            )


def run_one_step(
    manager: KVCacheManager, context: TextContext, token: int = 0, chunk: int | None = None
) -> None:
    """Run one step of one context: reserve, forward, update, commit."""
    manager.claim(context)
    if chunk is not None:
        context.set_token_indices(active_idx=min(context.start_idx + chunk, context.end_idx))
    manager.reserve(context)
    store_and_check_keys(manager, [context])
    context.update(token)
    manager.commit(context)


def block_tables(manager: KVCacheManager, context: TextContext) -> list[list[int]]:
    """Return the block table of a context in each group, without padding."""
    inputs = manager.inputs([context], counts=np.zeros(1, np.int64))
    return [group.block_tables[0].tolist() for group in inputs.groups]


def _expected_keys(manager: KVCacheManager, context: TextContext) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a number below 2**24 (exact in float32) for each position.

    Contexts on different sides of a limit of `KVCacheSpec.key_limits` get different numbers.
    """
    regime = manager.spec.regime(context.current_length)
    crc, keys = crc32(repr((context.cache_salt, context.adapter, regime)).encode()), []
    for index, token in enumerate(context.all_tokens.tolist()):
        crc = crc32(b"%d;" % context.token_hash_overrides.get(index, token), crc)
        keys.append(crc % 2**24)
    return np.array(keys, np.float32)
