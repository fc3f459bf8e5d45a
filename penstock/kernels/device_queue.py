"""`DeviceQueue`: work on a device that runs asynchronously to the host.

A back end with asynchronous operations has a queue. With a queue, the pipelines prepare and launch a step
while the device runs the previous step::

    host    prepare 1  launch 1 | prepare 2  launch 2 | tokens of 1 | prepare 3  launch 3 | tokens of 2
    device                      | step 1 .............| step 2 .....................| step 3 .......

The tokens that step 1 samples stay on the device, where step 2 reads them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Alignment in bytes of the tensors of an `UploadBatch`. Kernels read aligned tensors in wider units."""
_thread_state = threading.local()
"""``batch``: the `UploadBatch` of the `uploaded_together` block that this thread runs, if it runs one."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SubmittedWork(ABC, Generic[T_co]):
    """The result of work that was submitted to a queue."""

    @property
    @abstractmethod
    def value(self) -> T_co:
        """The result.

        Work that is submitted later can use its tensors. The host may read only their shapes.
        """


class HostCopy(ABC):
    """A tensor that is being copied to the host."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Wait until the tensor is computed and copied. Return the tensor in host memory.

        Raises:
            Exception: the error of the work. After an error, other results of the queue are undefined.
        """


class DeviceQueue(ABC):
    """Runs work in the order in which it is submitted. Only one thread may use a queue."""

    @abstractmethod
    def submit(self, work: Callable[[], T]) -> SubmittedWork[T]:
        """Append ``work``, a function that runs operations on tensors of the device.

        Inputs that ``work`` reads from host memory must be complete when it is submitted.
        """

    @abstractmethod
    def fetch(self, result: SubmittedWork[Tensor]) -> HostCopy:
        """Copy a result to the host once it is computed.

        Work that is submitted later does not delay the copy.
        """


def upload(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return values in host memory as a tensor of a device, without waiting for earlier work of the device.

    For a CPU, the tensor shares the memory of the values. For a GPU, the values are copied through pinned
    memory. Within `uploaded_together` for the same device, NumPy arrays that the batch accepts
    (`UploadBatch.add`) are copied at the end of the block.
    """
    if device.type == "cpu":
        return values if isinstance(values, Tensor) else torch.from_numpy(values)
    batch = getattr(_thread_state, "batch", None)
    if batch is not None and batch.device == device and isinstance(values, np.ndarray):
        batched: Tensor | None = batch.add(values)
        if batched is not None:
            return batched
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def uploaded_together(device: torch.device) -> Iterator[None]:
    """Copy the NumPy arrays that this thread uploads in a ``with`` block together. Does nothing for a CPU.

    The tensors that `upload` returns for the arrays are filled at the end of the block. Until then the
    tensors have shapes and types, but no operation may read them. `upload` copies torch tensors, and arrays
    that `UploadBatch.add` does not accept, immediately.
    """
    if device.type == "cpu":
        yield
        return
    _thread_state.batch = batch = UploadBatch(device)
    try:
        yield
    finally:
        _thread_state.batch = None
        batch.copy()


class UploadBatch:
    """Collects arrays, which `copy` then copies to a device as one block of memory.

    Args:
        device: the device.
        num_bytes: the capacity in bytes.
        is_pinned: whether the host memory is pinned. Only copies from pinned memory are asynchronous.
    """

    def __init__(self, device: torch.device, num_bytes: int = 1 << 16, *, is_pinned: bool = True) -> None:
        self.device = device
        self._host_buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._host_array = self._host_buffer.numpy()
        self._device_buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._used_bytes = 0

    def add(self, array: np.ndarray) -> Tensor | None:
        """Return the tensor that `copy` fills with ``array``; None if the array is empty or does not fit."""
        start, stop = self._used_bytes, self._used_bytes + array.nbytes
        if stop > len(self._host_array) or array.nbytes == 0:
            return None
        self._host_array[start:stop] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._used_bytes = -(-stop // _ALIGNMENT) * _ALIGNMENT
        dtype = torch.from_numpy(array[:0]).dtype
        return self._device_buffer[start:stop].view(dtype).view(array.shape)

    def copy(self) -> None:
        """Copy all collected arrays to the device."""
        if self._used_bytes:
            num_bytes = min(self._used_bytes, len(self._host_array))
            self._device_buffer[:num_bytes].copy_(self._host_buffer[:num_bytes], non_blocking=True)
