"""The recurrent states of layers with linear attention.

`RecurrentStates` holds the tensors. `SavedStates` finds saved states by the digest of a prefix.

A state belongs to one position of a sequence. A prefix can be reused only up to a position whose state was
saved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.driver import zeros
from penstock.errors import UnsupportedFeatureError
from penstock.host.memory import discard_pages
from penstock.kernels import StateInputs, upload
from penstock.kernels.recurrent_ops import NUM_SAVES
from penstock.kv_cache.spec import StateSpec


class RecurrentStates:
    """The states of all layers. The slot of a sequence in the cache is the index of its state.

    Args:
        spec: the shape of the states.
        num_states: the maximum number of sequences.
        num_saved: the number of saved states. Their indices follow those of the sequences.
        device: the device of the tensors.
    """

    def __init__(self, spec: StateSpec, num_states: int, num_saved: int, device: torch.device) -> None:
        self._device = device
        num_total = num_states + num_saved
        inputs_shape = (num_total, spec.kernel - 1, spec.channels)
        recurrent_shape = (num_total, spec.heads, spec.key_dim, spec.value_dim)
        self._layers = tuple(
            (
                zeros(inputs_shape, spec.dtype.to_torch(), device),
                zeros(recurrent_shape, torch.float32, device),
            )
            for _ in range(spec.num_layers)
        )

    def inputs(self, slots: Sequence[int], saves: Sequence[Sequence[tuple[int, int]]]) -> StateInputs:
        """Return the states of a batch for its next step.

        Args:
            slots: the slot of each sequence.
            saves: for each sequence up to `NUM_SAVES` pairs of `StateInputs.saves`.
        """
        pairs = np.zeros((len(slots), NUM_SAVES, 2), np.int64)
        for row, sequence_saves in zip(pairs, saves, strict=True):
            row[: len(sequence_saves)] = np.reshape(sequence_saves, (-1, 2))
        slot_tensor = upload(np.array(slots, np.int64), self._device)
        return StateInputs(slot_tensor, upload(pairs.reshape(-1), self._device), self._layers)

    def copy(self, source: int, target: int) -> None:
        """Copy the state in slot ``source`` to slot ``target``."""
        for tensor in self._tensors():
            tensor[target] = tensor[source]

    def discard(self) -> None:
        """Return the memory of all states to the system.

        Raises:
            UnsupportedFeatureError: the tensors are not in host memory.
        """
        for tensor in self._tensors():
            if tensor.device.type != "cpu":
                raise UnsupportedFeatureError(
                    "releasing only the KV cache",
                    "not possible on a GPU: use level 2, which also releases the weights",
                )
            discard_pages(tensor.data_ptr(), tensor.nbytes)

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self._layers for tensor in layer]


class SavedStates:
    """An LRU index of the saved states, by the digest of the last block before the state's position.

    Args:
        indices: the indices of the states in `RecurrentStates`.
    """

    def __init__(self, indices: range) -> None:
        self._indices = indices
        self._free = list(indices)
        self._saved: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._saved

    def find(self, digest: bytes) -> int:
        """Return the index of a saved state, and make the state the most recently used."""
        self._saved.move_to_end(digest)
        return self._saved[digest]

    def reserve(self) -> int | None:
        """Return an index for a new state. Evicts a saved state if no index is free.

        The caller later passes the index to `add` or `free`.

        Returns None if all indices are reserved.
        """
        if not self._free and self._saved:
            self._free.append(self._saved.popitem(last=False)[1])
        return self._free.pop() if self._free else None

    def add(self, digest: bytes, index: int) -> None:
        """Record the state that was written at a reserved index."""
        if digest in self._saved:
            self._free.append(self._saved.pop(digest))
        self._saved[digest] = index

    def free(self, index: int) -> None:
        """Make a reserved index free again, without a saved state."""
        self._free.append(index)

    def check_integrity(self, pending: Sequence[int]) -> None:
        """Raise an AssertionError unless each index is free, saved or in ``pending``, and only once."""
        indices = sorted([*self._free, *self._saved.values(), *pending])
        assert indices == list(self._indices), f"free, saved and pending: {indices}, not {self._indices}"

    def clear(self) -> None:
        """Forget all saved states."""
        self._free += self._saved.values()
        self._saved.clear()
