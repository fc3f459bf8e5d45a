"""`CudaMemory`: the free and the peak memory of a GPU, from torch's allocator and the driver."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from penstock.kernels.cuda.ops import CudaOps
from penstock.kernels.device_memory import DeviceMemory
from penstock.kernels.ops import Ops


class CudaMemory(DeviceMemory):
    """The memory of a GPU.

    `peak` measures the growth of the memory that torch's allocator reserves, including gaps between tensors.

    Args:
        device: the GPU.
        cuda: the functions of `torch.cuda`.
    """

    def __init__(self, device: torch.device, *, cuda: ModuleType = torch.cuda) -> None:
        self._device, self._cuda = device, cuda

    def free(self) -> int:
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        return int(self._cuda.mem_get_info(self._device)[0])

    def peak(self, work: Callable[[], object]) -> int:
        cuda, device = self._cuda, self._device
        cuda.synchronize(device)
        cuda.empty_cache()
        reserved_bytes_before = cuda.memory_reserved(device)
        cuda.reset_peak_memory_stats(device)
        try:
            work()
            cuda.synchronize(device)
        except cuda.OutOfMemoryError as error:
            raise MemoryError(str(error).splitlines()[0]) from error
        return int(cuda.max_memory_reserved(device)) - int(reserved_bytes_before)


def make_device_memory(ops: Ops, device: torch.device) -> CudaMemory | None:
    """Return the memory of the device; None if it is not a GPU or the operations are not `CudaOps`."""
    is_gpu = isinstance(ops, CudaOps) and device.type == "cuda"
    return CudaMemory(device) if is_gpu else None
