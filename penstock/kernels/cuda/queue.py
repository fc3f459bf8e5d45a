"""`CudaQueue`: launches work in the current stream, and copies to the host in a side stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, TypeVar

import torch
from torch import Tensor

from penstock.kernels.cuda.ops import CudaOps
from penstock.kernels.device_queue import DeviceQueue, HostCopy, SubmittedWork
from penstock.kernels.ops import Ops

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LaunchedWork(SubmittedWork[T], Generic[T]):
    """Work whose operations have been launched in the current stream."""

    result: T

    @property
    def value(self) -> T:
        return self.result


@dataclass(frozen=True, slots=True)
class PinnedCopy(HostCopy):
    """A copy to pinned host memory, which is complete when ``done_event`` has occurred."""

    host_tensor: Tensor
    done_event: torch.cuda.Event

    def wait(self) -> Tensor:
        self.done_event.synchronize()
        return self.host_tensor


class CudaQueue(DeviceQueue):
    """Launches work in the current stream.

    Copies to the host run in a side stream. A copy waits for the work that was launched before it, and runs
    concurrently with later work.

    Args:
        cuda: the functions of `torch.cuda`.
    """

    def __init__(self, *, cuda: ModuleType = torch.cuda) -> None:
        self._cuda = cuda
        self._copy_stream: torch.cuda.Stream | None = None

    def submit(self, work: Callable[[], T]) -> LaunchedWork[T]:
        return LaunchedWork(work())

    def fetch(self, result: SubmittedWork[Tensor]) -> PinnedCopy:
        cuda, tensor = self._cuda, result.value
        if self._copy_stream is None:
            self._copy_stream = cuda.Stream(tensor.device)
        self._copy_stream.wait_stream(cuda.current_stream(tensor.device))
        with cuda.stream(self._copy_stream):
            host_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            host_tensor.copy_(tensor, non_blocking=True)
            done_event = cuda.Event()
            done_event.record(self._copy_stream)
        if tensor.is_cuda:
            tensor.record_stream(self._copy_stream)  # the memory is reused only after the copy has run
        return PinnedCopy(host_tensor, done_event)


def make_queue(ops: Ops) -> CudaQueue | None:
    """Return the queue of ``ops``; None if they are not `CudaOps` on a GPU."""
    return CudaQueue() if isinstance(ops, CudaOps) and torch.cuda.is_available() else None
