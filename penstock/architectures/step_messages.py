"""`StepMessage`: the inputs of a step, sent from rank 0 to the other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.architectures.model import ModelInputs
from penstock.kernels import KVCacheInputs, KVGroupInputs, LoRAInputs
from penstock.kv_cache import KVCacheManager
from penstock.lora import LoRAManager


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """The tensors of `ModelInputs` as arrays, with the block tables of rank 0."""

    tokens: np.ndarray
    row_offsets: np.ndarray
    positions: np.ndarray
    logit_rows: np.ndarray
    logit_offsets: np.ndarray
    text_lengths: np.ndarray | None
    spans: np.ndarray | None
    lengths: np.ndarray
    """`KVCacheInputs.lengths`."""
    groups: tuple[tuple[np.ndarray, np.ndarray, int | None, bool], ...]
    """For each KV cache group: block tables, slots, window, and whether attention is chunked."""
    adapters: np.ndarray | None
    """`LoRAInputs.rows`."""
    embeds: tuple[np.ndarray, np.ndarray, torch.dtype] | None
    """The indices of image rows, their embeddings as float32, and the original type of the embeddings."""

    @classmethod
    def from_inputs(cls, inputs: ModelInputs) -> StepMessage:
        """Return the message that contains the inputs of a step."""
        kv, embeds = inputs.kv, inputs.input_embeds
        assert kv is not None
        return cls(
            tokens=_array(inputs.tokens),
            row_offsets=_array(inputs.row_offsets),
            positions=_array(inputs.positions),
            logit_rows=_array(inputs.logit_rows),
            logit_offsets=_array(inputs.logit_offsets),
            text_lengths=None if inputs.text_lengths is None else _array(inputs.text_lengths),
            spans=None if inputs.spans is None else _array(inputs.spans),
            lengths=_array(kv.lengths),
            groups=tuple(
                (_array(group.block_tables), _array(group.slots), group.window, group.is_chunked)
                for group in kv.groups
            ),
            adapters=None if inputs.lora is None else _array(inputs.lora.rows),
            embeds=None
            if embeds is None
            else (_array(embeds[0]), _array(embeds[1].float()), embeds[1].dtype),
        )

    def inputs(self, kv: KVCacheManager, adapters: LoRAManager | None) -> ModelInputs:
        """Return the inputs of the step on another rank.

        Args:
            kv: the cache of this rank.
            adapters: the adapters of this rank.
        """

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(kv.device)

        groups = tuple(
            KVGroupInputs(tensor(tables), tensor(slots), window, is_chunked, group.has_fixed_scales)
            for (tables, slots, window, is_chunked), group in zip(self.groups, kv.spec.groups, strict=True)
        )
        cache = KVCacheInputs(
            lengths=tensor(self.lengths),
            groups=groups,
            group_of_layer=kv.spec.group_of_layer,
            caches=kv.storage.caches,
            scales=kv.storage.scales,
            block_size=kv.block_size,
        )
        lora: LoRAInputs | None = None
        if self.adapters is not None:
            assert adapters is not None
            lora = adapters.inputs_for_rows(tensor(self.adapters))
        embeds = None
        if self.embeds is not None:
            rows, values, dtype = self.embeds
            embeds = (tensor(rows), tensor(values).to(dtype))
        return ModelInputs(
            tokens=tensor(self.tokens),
            row_offsets=tensor(self.row_offsets),
            positions=tensor(self.positions),
            logit_rows=tensor(self.logit_rows),
            logit_offsets=tensor(self.logit_offsets),
            kv=cache,
            lora=lora,
            input_embeds=embeds,
            spans=None if self.spans is None else tensor(self.spans),
            text_lengths=None if self.text_lengths is None else tensor(self.text_lengths),
        )


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
