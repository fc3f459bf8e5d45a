"""`AdapterSlots`: the stacked matrices of running adapters on the device, with one slot per adapter."""

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
        parts: this rank's parts of the layers that are divided among ranks.
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
        """Function that is called with slot and adapter before `assign` puts an adapter into a slot."""
        self._max_rank, self._layers, self._dtype, self._device = max_rank, layers, dtype, device
        self._slot_adapters: list[Adapter | None] = [None] * num_slots
        self._last_used = [0] * num_slots
        self._clock = count(1)
        self.matrices: Mapping[str, tuple[Tensor, Tensor]] = {}
        """Maps each layer to A ``[n, R, in]`` and B ``[n, out, R]``. B is a view of ``[n, R, out]``.

        Adding a layer replaces the mapping, so that the inputs of launched steps do not change."""
        self.ranks: Mapping[str, Tensor] = {}
        """Maps each layer to the ranks of the adapters in the slots, ``[n]`` int64 in host memory. The rank
        is 0 if the slot's adapter has no matrices for the layer. Matrix entries beyond the rank are
        undefined."""

    @property
    def slot_digests(self) -> list[bytes | None]:
        """The digest of the adapter in each slot; None for an empty slot."""
        return [None if adapter is None else adapter.digest for adapter in self._slot_adapters]

    def assign(
        self, adapters: Mapping[bytes, Adapter], digests_to_keep: Collection[bytes] = ()
    ) -> dict[bytes, int]:
        """Put each adapter into a slot if it has none, and return the slot of each digest.

        Args:
            adapters: the adapters by digest, at most as many as there are slots.
            digests_to_keep: digests of further adapters, which are evicted last.
        """
        assert len(adapters) <= len(self._slot_adapters), (
            f"{len(adapters)} adapters for {len(self._slot_adapters)} slots"
        )
        slot_digests = self.slot_digests
        slots = {digest: slot_digests.index(digest) for digest in adapters if digest in slot_digests}
        for digest, adapter in adapters.items():
            if digest not in slots:
                slots[digest] = self._slot_to_evict(set(slots.values()), digests_to_keep)
                self._put(slots[digest], adapter)
        for digest in adapters:
            self._last_used[slots[digest]] = next(self._clock)
        return slots

    def _slot_to_evict(self, used_slots: Collection[int], digests_to_keep: Collection[bytes]) -> int:
        def eviction_order(slot: int) -> tuple[bool, int]:
            adapter = self._slot_adapters[slot]
            return adapter is not None and adapter.digest in digests_to_keep, self._last_used[slot]

        slots = (slot for slot in range(len(self._slot_adapters)) if slot not in used_slots)
        return min(slots, key=eviction_order)

    def _put(self, slot: int, adapter: Adapter) -> None:
        self.on_put(slot, adapter)
        self.put(slot, adapter.matrices)
        self._slot_adapters[slot] = adapter

    def put(self, slot: int, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Copy this rank's part of an adapter's matrices into a slot.

        Args:
            slot: the number of the slot.
            matrices: A ``[r, in]`` and B ``[out, r]`` of each whole layer.
        """
        for ranks in self.ranks.values():
            ranks[slot] = 0
        new_layers = [layer for layer in matrices if layer not in self.matrices]
        if new_layers:
            new_matrices = {layer: self._allocate(layer, matrices[layer]) for layer in new_layers}
            self.matrices = {**self.matrices, **new_matrices}
            zero_ranks = {
                layer: host_zeros(len(self._slot_adapters), torch.int64, self._device) for layer in new_layers
            }
            self.ranks = {**self.ranks, **zero_ranks}
        for layer, (down, up) in matrices.items():
            part = self._parts.get(layer)
            if part is not None:  # row-parallel: a part of A's inputs; column-parallel: a part of B's outputs
                down = down if part.inputs is None else down[:, part.inputs.start : part.inputs.stop]
                up = concatenated(part.slice_rows(up))
            slot_down, slot_up = (stacked[slot] for stacked in self.matrices[layer])
            rank = down.shape[0]
            slot_down[:rank].copy_(down)
            slot_up[:, :rank].copy_(up)
            self.ranks[layer][slot] = rank

    def _allocate(self, layer: str, matrices: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Allocate the stacked matrices of a layer.

        Adapters of an embedding table are task adapters. They all have the same rank, so their stack has this
        rank instead of the maximum rank.
        """
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
