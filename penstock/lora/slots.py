"""The stacked matrices of running adapters on the device, one slot per adapter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import count
from types import MappingProxyType

import torch
from torch import Tensor

from penstock.driver import host_zeros
from penstock.lora.adapter import Adapter, Layers, Parts, layer_shape
from penstock.nn.layer_parts import concatenated


class AdapterSlots:
    """A fixed number of slots for adapters, identified by digest. The least recently used adapter is evicted.

    The memory of a layer is allocated when the first adapter with matrices for that layer gets a slot. The
    address of this memory never changes, because compiled steps and CUDA graphs contain it.

    Args:
        num_slots: n, the number of slots.
        max_rank: R, the maximum rank of an adapter.
        layers: the linear layers of the base model.
        dtype: the type of the activations.
        device: where the matrices are stored.
        parts: the layers that are divided among ranks. The slots hold this rank's part of the matrices.
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        layers: Layers,
        dtype: torch.dtype,
        device: torch.device,
        parts: Parts = MappingProxyType({}),
    ) -> None:
        self._parts = parts
        self.on_put: Callable[[int, Adapter], None] = lambda slot, adapter: None
        """Function that is called with the slot and the adapter before an adapter is put into a slot."""
        self._max_rank, self._layers, self._dtype, self._device = max_rank, layers, dtype, device
        self._slot_adapters: list[Adapter | None] = [None] * num_slots
        self._last_used = [0] * num_slots
        self._clock = count(1)
        self.matrices: Mapping[str, tuple[Tensor, Tensor]] = {}
        """Layer -> A ``[n, R, in]`` and B ``[n, out, R]``, a view of ``[n, R, out]``.

        Adding layers replaces the mapping, so a batch with the old mapping keeps its layers."""
        self.ranks: Mapping[str, Tensor] = {}
        """Layer -> rank of the adapter in each slot, ``[n]`` int64 in host memory. Matrix entries beyond a
        slot's rank are undefined."""

    @property
    def slot_digests(self) -> list[bytes | None]:
        """The digest of the adapter in each slot."""
        return [None if adapter is None else adapter.digest for adapter in self._slot_adapters]

    def assign(self, adapters: Mapping[bytes, Adapter], keep: Collection[bytes] = ()) -> dict[bytes, int]:
        """Give each adapter a slot, and return the slot of each digest.

        Args:
            adapters: digest -> adapter, at most one per slot.
            keep: digests of other adapters to evict last.
        """
        assert len(adapters) <= len(self._slot_adapters), (
            f"{len(adapters)} adapters for {len(self._slot_adapters)} slots"
        )
        slot_digests = self.slot_digests
        slots = {digest: slot_digests.index(digest) for digest in adapters if digest in slot_digests}
        for digest, adapter in adapters.items():
            if digest not in slots:
                slots[digest] = self._slot_to_evict(set(slots.values()), keep)
                self._put(slots[digest], adapter)
        for digest in adapters:
            self._last_used[slots[digest]] = next(self._clock)
        return slots

    def _slot_to_evict(self, taken: Collection[int], keep: Collection[bytes]) -> int:
        def cost(slot: int) -> tuple[bool, int]:
            adapter = self._slot_adapters[slot]
            return adapter is not None and adapter.digest in keep, self._last_used[slot]

        return min((slot for slot in range(len(self._slot_adapters)) if slot not in taken), key=cost)

    def _put(self, slot: int, adapter: Adapter) -> None:
        self.on_put(slot, adapter)
        self.put(slot, adapter.matrices)
        self._slot_adapters[slot] = adapter

    def put(self, slot: int, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Copy the matrices of an adapter, or this process's part of them, into a slot.

        Args:
            slot: the number of the slot.
            matrices: layer -> A ``[r, in]`` and B ``[out, r]`` of the whole layer.
        """
        for ranks in self.ranks.values():
            ranks[slot] = 0
        new = [layer for layer in matrices if layer not in self.matrices]
        if new:
            own = {layer: self._allocate(layer, matrices[layer]) for layer in new}
            self.matrices = {**self.matrices, **own}
            no_ranks = {
                layer: host_zeros(len(self._slot_adapters), torch.int64, self._device) for layer in new
            }
            self.ranks = {**self.ranks, **no_ranks}
        for layer, (down, up) in matrices.items():
            part = self._parts.get(layer)
            if part is not None:  # column-parallel: outputs of B; row-parallel: inputs of A
                down = down if part.inputs is None else down[:, part.inputs.start : part.inputs.stop]
                up = concatenated(part.slice_rows(up))
            all_down, all_up = self.matrices[layer]
            rank = down.shape[0]
            all_down[slot, :rank].copy_(down)
            all_up[slot, :, :rank].copy_(up)
            self.ranks[layer][slot] = rank

    def _allocate(self, layer: str, matrices: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return memory for a layer, or for an embedding table, whose adapters all have the same rank."""
        num_slots, rank = len(self._slot_adapters), self._max_rank
        options = {"dtype": self._dtype, "device": self._device}
        if layer not in self._layers:
            (rank, tokens), size = matrices[0].shape, len(matrices[1])
            rows = torch.zeros(num_slots, tokens, rank, **options)  # type: ignore[call-overload]
            return rows.mT, torch.zeros(num_slots, size, rank, **options)  # type: ignore[call-overload]
        out_features, in_features = layer_shape(self._layers, layer)
        down = torch.zeros(num_slots, rank, in_features, **options)  # type: ignore[call-overload]
        up = torch.zeros(num_slots, rank, out_features, **options)  # type: ignore[call-overload]
        return down, up.transpose(1, 2)
