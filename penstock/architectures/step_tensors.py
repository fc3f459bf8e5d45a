"""The tensors of a step that differ from one to the next of the same shape: what a recorded step is given."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from penstock.architectures.model import ModelInputs
from penstock.kernels import LoRAInputs


def eager_reason(inputs: ModelInputs, max_rows: int) -> str | None:
    """What keeps a step from being replayed by plans of at most so many rows; None where nothing does."""
    if inputs.kv is None:
        return "there is no KV cache"
    if len(inputs.tokens) > max_rows:
        return f"more than {max_rows} rows"
    return None if inputs.input_embeds is None else "given embeddings"


def shape_of(inputs: ModelInputs, columns: Callable[[int], int]) -> Hashable:
    """All about a step's inputs that changes its operations; ``columns``: what block tables are given."""
    kv = inputs.kv
    assert kv is not None
    return (
        inputs.tokens.shape[0],
        kv.lengths.shape[0],
        inputs.logit_rows.shape[0],
        inputs.text_lengths is None,
        kv.caches[0].data_ptr(),  # a step writes to the cache that it was recorded with
        _room_for_adapters(inputs.lora),
        *(columns(group.block_tables.shape[1]) for group in kv.groups),
    )


def _room_for_adapters(lora: LoRAInputs | None) -> Hashable:
    """What a step reads of adapters: layers are added to it, and none moves or is taken away."""
    if lora is None:
        return ()
    return (len(lora.matrices), *(down.data_ptr() for down, _ in islice(lora.matrices.values(), 1)))


def tensors_of_step(inputs: ModelInputs) -> dict[str, Tensor]:
    """The tensors by name, in one order."""
    kv = inputs.kv
    assert kv is not None
    tensors = {
        "tokens": inputs.tokens,
        "positions": inputs.positions,
        "row_offsets": inputs.row_offsets,
        "logit_rows": inputs.logit_rows,
        "lengths": kv.lengths,
    }
    for index, group in enumerate(kv.groups):
        tensors[f"tables.{index}"] = group.block_tables
        tensors[f"slots.{index}"] = group.slots
    if inputs.text_lengths is not None:
        tensors["text_lengths"] = inputs.text_lengths
    if inputs.lora is not None:
        tensors["adapters"] = inputs.lora.rows
    return tensors


def with_tensors(inputs: ModelInputs, tensors: Mapping[str, Tensor]) -> ModelInputs:
    """The inputs with others of these tensors."""
    assert inputs.kv is not None
    groups = tuple(
        replace(group, block_tables=tensors[f"tables.{index}"], slots=tensors[f"slots.{index}"])
        for index, group in enumerate(inputs.kv.groups)
    )
    return replace(
        inputs,
        tokens=tensors["tokens"],
        positions=tensors["positions"],
        row_offsets=tensors["row_offsets"],
        logit_rows=tensors["logit_rows"],
        kv=replace(inputs.kv, lengths=tensors["lengths"], groups=groups),
        text_lengths=tensors.get("text_lengths"),
        lora=inputs.lora and replace(inputs.lora, rows=tensors["adapters"]),
    )


def tensors_of_later_steps(inputs: ModelInputs, num_steps: int) -> dict[str, Tensor]:
    """What differs in a step of one row a sequence and in those behind it, besides the tokens: name ->
    ``[n, ...]``.

    The blocks for them are reserved already; `KVCacheInputs.advance` does the same a step at a time.
    """
    kv = inputs.kv
    assert kv is not None
    ahead = torch.arange(num_steps)[:, None]
    lengths = kv.lengths + ahead  # [n, B] int64
    positions = lengths - 1
    tensors = {"positions": inputs.positions + ahead, "lengths": lengths.int()}
    for index, group in enumerate(kv.groups):
        tensors[f"slots.{index}"] = group.slots_at(positions, kv.block_size).contiguous()
    if inputs.text_lengths is not None:
        tensors["text_lengths"] = inputs.positions + ahead + 1
    return tensors
