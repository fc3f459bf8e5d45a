"""`CudaMemory`: free and peak memory of a GPU, with a fake of torch's counters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from penstock.kernels.cuda.memory import CudaMemory, make_device_memory
from penstock.kernels.cuda.ops import CudaOps
from penstock.kernels.reference import ReferenceOps


class FakeCuda:
    """A fake of the memory counters of `torch.cuda`."""

    OutOfMemoryError = torch.cuda.OutOfMemoryError

    def __init__(self) -> None:
        self.reserved_bytes = self.peak = 100
        self.unused_bytes = 40  # reserved, but not in use

    def synchronize(self, device: object) -> None:
        return

    def empty_cache(self) -> None:
        self.reserved_bytes, self.unused_bytes = self.reserved_bytes - self.unused_bytes, 0

    def memory_reserved(self, device: object) -> int:
        return self.reserved_bytes

    def reset_peak_memory_stats(self, device: object) -> None:
        self.peak = self.reserved_bytes

    def max_memory_reserved(self, device: object) -> int:
        return self.peak

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return 1000 - self.reserved_bytes, 1000

    def allocate(self, num_bytes: int) -> None:
        if self.reserved_bytes + num_bytes > 1000:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        self.reserved_bytes += num_bytes
        self.peak = max(self.peak, self.reserved_bytes)

    def free(self, num_bytes: int) -> None:
        self.reserved_bytes -= num_bytes


def test_free_and_peak_memory_come_from_the_counters_of_torch() -> None:
    cuda: Any = FakeCuda()
    memory = CudaMemory(torch.device("cuda", 0), cuda=cuda)
    cuda.peak = 900  # the peak of earlier work
    assert memory.free() == 940

    def work() -> None:
        cuda.allocate(300)
        cuda.free(200)
        cuda.allocate(50)

    assert memory.peak(work) == 300
    with pytest.raises(MemoryError, match=r"CUDA out of memory\. Tried to allocate$"):
        memory.peak(lambda: cuda.allocate(2000))


def test_only_a_gpu_with_the_cuda_back_end_has_device_memory() -> None:
    assert make_device_memory(CudaOps(), torch.device("cpu")) is None
    assert make_device_memory(ReferenceOps(), torch.device("cuda", 0)) is None
    assert make_device_memory(CudaOps(), torch.device("cuda", 0)) is not None
