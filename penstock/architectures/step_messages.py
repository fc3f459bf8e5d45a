"""The inputs of a step as a message from rank 0 to the other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.architectures.model import ModelInputs
from penstock.kernels import KVCacheInputs, KVGroupInputs, LoRAInputs
from penstock.kv_cache import KVCacheManager
from penstock.lora import LoRAManager

_TENSORS = ("tokens", "row_offsets", "positions", "logit_rows", "logit_offsets", "text_lengths", "spans")
"""Fields of `ModelInputs` that a message holds."""


def pack_inputs(inputs: ModelInputs) -> dict[str, object]:
    """Return the tensors of a step as arrays, for a message."""
    kv, embeds = inputs.kv, inputs.input_embeds
    assert kv is not None
    return {
        **{name: _array(getattr(inputs, name)) for name in _TENSORS},
        "lengths": _array(kv.lengths),
        "groups": [
            (_array(group.block_tables), _array(group.slots), group.window, group.is_chunked)
            for group in kv.groups
        ],
        "adapters": None if inputs.lora is None else _array(inputs.lora.rows),
        "embeds": None if embeds is None else (_array(embeds[0]), _array(embeds[1].float())),
        "embeds_dtype": None if embeds is None else embeds[1].dtype,
    }


def unpack_inputs(fields: Mapping[str, Any], kv: KVCacheManager, adapters: LoRAManager | None) -> ModelInputs:
    """Return the inputs of a step on another rank.

    Args:
        fields: the result of `pack_inputs` on rank 0.
        kv: the cache of this rank.
        adapters: the adapters of this rank.
    """

    def tensor(array: np.ndarray | None) -> Tensor | None:
        return None if array is None else needed(array)

    def needed(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(kv.device)

    groups = tuple(
        KVGroupInputs(needed(tables), needed(slots), window, is_chunked)
        for tables, slots, window, is_chunked in fields["groups"]
    )
    cache = KVCacheInputs(
        lengths=needed(fields["lengths"]),
        groups=groups,
        group_of_layer=kv.spec.group_of_layer,
        caches=kv.storage.caches,
        scales=kv.storage.scales,
        block_size=kv.block_size,
    )
    lora: LoRAInputs | None = None
    if fields["adapters"] is not None:
        assert adapters is not None
        lora = adapters.inputs_of_rows(needed(fields["adapters"]))
    embeds = None
    if fields["embeds"] is not None:
        rows, values = fields["embeds"]
        embeds = (needed(rows), needed(values).to(fields["embeds_dtype"]))
    tensors: dict[str, Any] = {name: tensor(fields[name]) for name in _TENSORS}
    return ModelInputs(**tensors, kv=cache, lora=lora, input_embeds=embeds)


def _array(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.cpu().numpy()
