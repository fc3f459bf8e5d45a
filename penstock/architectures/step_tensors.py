"""The inputs of a compiled step: the tensors that change between steps of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from penstock.architectures.model import ModelInputs
from penstock.kernels import LoRAInputs


def eager_reason(inputs: ModelInputs, max_rows: int) -> str | None:
    """Return the reason why a step cannot be compiled for up to ``max_rows`` rows; None if it can."""
    if inputs.kv is None:
        return "there is no KV cache"
    if len(inputs.tokens) > max_rows:
        return f"more than {max_rows} rows"
    if inputs.positions.dim() == 2:
        return "positions of several axes"
    return None if inputs.spans is None else "spans of images"


def step_key(inputs: ModelInputs, padded_width: Callable[[int], int]) -> Hashable:
    """Return the key of a compiled step: all properties of the inputs that affect its operations.

    Args:
        inputs: the inputs of the step.
        padded_width: maps the width of a block table to the width that a compiled step reserves for it.
    """
    kv, embeds = inputs.kv, inputs.input_embeds
    assert kv is not None
    return (
        inputs.tokens.shape[0],
        kv.lengths.shape[0],
        inputs.logit_rows.shape[0],
        inputs.text_lengths is None,
        None if embeds is None else (embeds[1].shape, embeds[1].dtype),
        kv.caches[0].data_ptr(),  # a compiled step writes to the cache with which it was recorded
        _adapter_key(inputs.lora),
        *(padded_width(group.block_tables.shape[1]) for group in kv.groups),
    )


def _adapter_key(lora: LoRAInputs | None) -> Hashable:
    """Return a key of the adapter matrices of a step.

    The number of layers with adapters and the address of the first matrix identify the matrices, because the
    memory of a layer is never moved or freed.
    """
    if lora is None:
        return ()
    return (len(lora.matrices), *(down.data_ptr() for down, _ in islice(lora.matrices.values(), 1)))


def step_tensors(inputs: ModelInputs) -> dict[str, Tensor]:
    """Return the tensors of a step by name, in a fixed order."""
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
    if kv.states is not None:
        tensors["states"] = kv.states.slots
        tensors["saves"] = kv.states.saves
    if inputs.text_lengths is not None:
        tensors["text_lengths"] = inputs.text_lengths
    if inputs.lora is not None:
        tensors["adapters"] = inputs.lora.rows
    if inputs.input_embeds is not None:
        rows, embeddings = inputs.input_embeds
        tensors["embedded_rows"] = rows
        tensors["embeddings"] = embeddings[:, None]  # [P, 1, W]: compiled steps pad two-dimensional inputs
    return tensors


def with_tensors(inputs: ModelInputs, tensors: Mapping[str, Tensor]) -> ModelInputs:
    """Return a copy of the inputs in which ``tensors``, named as in `step_tensors`, replace the originals."""
    assert inputs.kv is not None
    groups = tuple(
        replace(group, block_tables=tensors[f"tables.{index}"], slots=tensors[f"slots.{index}"])
        for index, group in enumerate(inputs.kv.groups)
    )
    states = inputs.kv.states
    if states is not None:
        states = replace(states, slots=tensors["states"], saves=tensors["saves"])
    embeddings = None
    if inputs.input_embeds is not None:
        embeddings = tensors["embedded_rows"], tensors["embeddings"][:, 0]
    return replace(
        inputs,
        tokens=tensors["tokens"],
        positions=tensors["positions"],
        row_offsets=tensors["row_offsets"],
        logit_rows=tensors["logit_rows"],
        kv=replace(inputs.kv, lengths=tensors["lengths"], groups=groups, states=states),
        text_lengths=tensors.get("text_lengths"),
        input_embeds=embeddings,
        lora=inputs.lora and replace(inputs.lora, rows=tensors["adapters"]),
    )


def later_step_tensors(inputs: ModelInputs, num_steps: int) -> dict[str, Tensor]:
    """Return, by name, the tensors that change between ``num_steps`` decode steps, except the tokens.

    Each tensor is ``[n, ...]`` and starts with the values of ``inputs``.

    The blocks of all steps must be reserved already. `KVCacheInputs.advance` computes the same values for one
    step.
    """
    kv = inputs.kv
    assert kv is not None
    step_numbers = torch.arange(num_steps, device=kv.lengths.device)[:, None]
    lengths = kv.lengths + step_numbers  # [n, B] int64
    positions = lengths - 1
    tensors = {"positions": inputs.positions + step_numbers, "lengths": lengths.int()}
    for index, group in enumerate(kv.groups):
        tensors[f"slots.{index}"] = group.slots_at(positions, kv.block_size).contiguous()
    if inputs.text_lengths is not None:
        tensors["text_lengths"] = inputs.positions + step_numbers + 1
    return tensors
