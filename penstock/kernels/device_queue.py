"""`DeviceQueue`: work on a device that runs asynchronously to the host.

A back end with asynchronous operations has a queue. The pipelines then prepare and launch a step while the
device runs the previous step::

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
"""Alignment in bytes of the tensors of an upload. Kernels read aligned tensors in wider units."""
_current = threading.local()

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SubmittedWork(ABC, Generic[T_co]):
    """The result of work that was submitted to a queue."""

    @property
    @abstractmethod
    def value(self) -> T_co:
        """The result. Its tensors can be used by work that is submitted later, and their shapes are known."""


class HostCopy(ABC):
    """A tensor that is being copied to the host."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Return the tensor in host memory, after all work that it depends on has run.

        Raises:
            Exception: the error of the work. Later results of the queue are undefined.
        """


class DeviceQueue(ABC):
    """Runs work in the order in which it is submitted. One thread uses it."""

    @abstractmethod
    def submit(self, work: Callable[[], T]) -> SubmittedWork[T]:
        """Append a function that runs operations on tensors of the device.

        Inputs that the function reads from host memory must be ready.
        """

    @abstractmethod
    def fetch(self, result: SubmittedWork[Tensor]) -> HostCopy:
        """Copy a result to the host when it is computed. Work that is submitted later does not delay it."""


def upload(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return values in host memory as a tensor of a device, without waiting for earlier work of the device.

    On a CPU the tensor shares the memory of the values. For a GPU they are copied to pinned memory first.
    Within `uploaded_together`, NumPy arrays are copied to the device at the end of the block.
    """
    if device.type == "cpu":
        return values if isinstance(values, Tensor) else torch.from_numpy(values)
    batch = getattr(_current, "batch", None)
    if batch is not None and batch.device == device and isinstance(values, np.ndarray):
        batched: Tensor | None = batch.add(values)
        if batched is not None:
            return batched
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def uploaded_together(device: torch.device) -> Iterator[None]:
    """Make one copy of all NumPy arrays that this thread uploads in the block. Does nothing for a CPU.

    The tensors that `upload` returns are filled at the end of the block. Until then they have shapes and
    types, but no operation may read them. Torch tensors, and arrays that do not fit into the `UploadBatch`,
    are copied immediately.
    """
    if device.type == "cpu":
        yield
        return
    _current.batch = batch = UploadBatch(device)
    try:
        yield
    finally:
        _current.batch = None
        batch.copy()


class UploadBatch:
    """Arrays that are copied to a device as one block of memory.

    Args:
        device: the device.
        num_bytes: capacity.
        is_pinned: whether the host memory is pinned, so that the copy is asynchronous.
    """

    def __init__(self, device: torch.device, num_bytes: int = 1 << 16, *, is_pinned: bool = True) -> None:
        self.device = device
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._bytes = self._host.numpy()
        self._target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._used = 0

    def add(self, array: np.ndarray) -> Tensor | None:
        """Return the tensor that `copy` fills with an array; None if it does not fit or is empty."""
        start, stop = self._used, self._used + array.nbytes
        if stop > len(self._bytes) or array.nbytes == 0:
            return None
        self._bytes[start:stop] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._used = -(-stop // _ALIGNMENT) * _ALIGNMENT
        dtype = torch.from_numpy(array[:0]).dtype
        return self._target[start:stop].view(dtype).view(array.shape)

    def copy(self) -> None:
        """Copy all arrays."""
        if self._used:
            used = min(self._used, len(self._bytes))
            self._target[:used].copy_(self._host[:used], non_blocking=True)
