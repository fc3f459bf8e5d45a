"""The queue of a GPU: the current stream for work, a side stream for copies to the host."""

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
    """A copy to pinned memory, complete when its event has occurred."""

    host: Tensor
    done: torch.cuda.Event

    def wait(self) -> Tensor:
        self.done.synchronize()
        return self.host


class CudaQueue(DeviceQueue):
    """Launches work in the current stream.

    Copies to the host run in a side stream. A copy waits for the work that was launched before it, and runs
    concurrently with later work.

    Args:
        cuda: the functions of `torch.cuda`.
    """

    def __init__(self, *, cuda: ModuleType = torch.cuda) -> None:
        self._cuda = cuda
        self._side: torch.cuda.Stream | None = None

    def submit(self, work: Callable[[], T]) -> LaunchedWork[T]:
        return LaunchedWork(work())

    def fetch(self, result: SubmittedWork[Tensor]) -> PinnedCopy:
        cuda, tensor = self._cuda, result.value
        if self._side is None:
            self._side = cuda.Stream(tensor.device)
        self._side.wait_stream(cuda.current_stream(tensor.device))
        with cuda.stream(self._side):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            host.copy_(tensor, non_blocking=True)
            done = cuda.Event()
            done.record(self._side)
        if tensor.is_cuda:
            tensor.record_stream(self._side)  # the memory is reused only after the copy has run
        return PinnedCopy(host, done)


def make_queue(ops: Ops) -> CudaQueue | None:
    """Return the queue of these operations; None if they do not run on a GPU."""
    return CudaQueue() if isinstance(ops, CudaOps) and torch.cuda.is_available() else None
