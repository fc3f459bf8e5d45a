"""`RecurrentStates`: the states of layers with linear attention, one for each sequence in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.driver import zeros
from penstock.errors import UnsupportedFeatureError
from penstock.host.memory import discard_pages
from penstock.kernels import StateInputs, upload
from penstock.kv_cache.spec import StateSpec


class RecurrentStates:
    """The states of all layers. The slot of a sequence in the cache is the index of its state.

    Args:
        spec: the shape of the states.
        num_states: N, the number of sequences.
        device: the device of the tensors.
    """

    def __init__(self, spec: StateSpec, num_states: int, device: torch.device) -> None:
        self.num_states = num_states
        self._device = device
        inputs_shape = (num_states, spec.kernel - 1, spec.channels)
        recurrent_shape = (num_states, spec.heads, spec.key_dim, spec.value_dim)
        self._layers = tuple(
            (
                zeros(inputs_shape, spec.dtype.to_torch(), device),
                zeros(recurrent_shape, torch.float32, device),
            )
            for _ in range(spec.num_layers)
        )

    def inputs(self, slots: Sequence[int]) -> StateInputs:
        """Return the states of a batch for its next step."""
        return StateInputs(upload(np.array(slots, np.int64), self._device), self._layers)

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
