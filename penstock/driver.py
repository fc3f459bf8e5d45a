"""The devices of this machine: their names and their memory."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.host import limits, private_memory
from penstock.host.memory import CACHE_LINE

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch import Tensor as Buffer

__all__ = [
    "CPU",
    "Accelerator",
    "Buffer",
    "Device",
    "DeviceSpec",
    "Tensor",
    "accelerator_count",
    "host_zeros",
    "load_devices",
    "scan_available_devices",
    "zeros",
]


if not TYPE_CHECKING:  # a type checker must report names that do not exist

    def __getattr__(name: str) -> object:
        # `Buffer` and `Tensor` are torch.Tensor. They are resolved on use, so that importing this module
        # does not import torch.
        if name in ("Buffer", "Tensor"):
            import torch

            return torch.Tensor
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The name of a device, such as ``cpu`` or ``gpu:0``. `load_devices` opens the device."""

    id: int = 0
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        if self.device_type not in ("cpu", "gpu"):
            raise ConfigError("devices", f"unknown device type {self.device_type!r}: use cpu or gpu")
        if self.id < 0:
            raise ConfigError("devices", f"device id must not be negative, was {self.id}")

    @staticmethod
    def cpu(id: int = 0) -> DeviceSpec:
        """Return the CPU of the host."""
        return DeviceSpec(id, "cpu")

    @staticmethod
    def accelerator(id: int = 0) -> DeviceSpec:
        """Return NVIDIA GPU number ``id`` of the host."""
        return DeviceSpec(id, "gpu")

    @property
    def is_host(self) -> bool:
        """Whether the device is the CPU of the host."""
        return self.device_type == "cpu"

    def __str__(self) -> str:
        return "cpu" if self.device_type == "cpu" else f"gpu:{self.id}"


@dataclass(frozen=True, slots=True)
class Device:
    """An opened device. `CPU`, `Accelerator` and `load_devices` create devices."""

    spec: DeviceSpec

    @property
    def id(self) -> int:
        """The number of the device among the devices of its type."""
        return self.spec.id

    @property
    def is_host(self) -> bool:
        """Whether the device is the CPU of the host."""
        return self.spec.device_type == "cpu"

    @property
    def label(self) -> str:
        """``cpu`` or ``gpu``."""
        return self.spec.device_type

    @property
    def torch_device(self) -> torch.device:
        """The device as a ``torch.device``."""
        import torch

        return torch.device("cpu") if self.is_host else torch.device("cuda", self.id)

    @property
    def stats(self) -> Mapping[str, int]:
        """The current ``total_memory`` and ``free_memory`` in bytes."""
        if self.is_host:
            total, free = _host_memory()
            return {"total_memory": total, "free_memory": free}
        import torch

        free, total = torch.cuda.mem_get_info(self.id)
        return {"total_memory": total, "free_memory": free}

    def __str__(self) -> str:
        return str(self.spec)


def CPU(id: int = 0) -> Device:  # named as in MAX's `max.driver`
    """Return the CPU of the host as a device."""
    return Device(DeviceSpec.cpu(id))


def Accelerator(id: int = 0) -> Device:  # named as in MAX's `max.driver`
    """Return NVIDIA GPU number ``id`` as a device.

    Raises:
        ConfigError: the GPU does not exist, or ``id`` is negative.
    """
    count = accelerator_count()
    if id >= count:
        raise ConfigError("devices", f"gpu:{id} does not exist, {_gpu_count_text(count)}: use --devices cpu")
    return Device(DeviceSpec.accelerator(id))


def accelerator_count() -> int:
    """Return the number of NVIDIA GPUs that torch can use; 0 without a GPU driver."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def scan_available_devices() -> list[DeviceSpec]:
    """Return all NVIDIA GPUs that torch can use, or the CPU if there are none."""
    return [DeviceSpec.accelerator(i) for i in range(accelerator_count())] or [DeviceSpec.cpu()]


def load_devices(specs: Sequence[DeviceSpec]) -> list[Device]:
    """Open devices.

    Raises:
        ConfigError: a device does not exist.
    """
    return [CPU() if spec.device_type == "cpu" else Accelerator(spec.id) for spec in specs]


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros.

    In host memory, the tensor begins at a cache line, and the system allocates each page when it is first
    written.
    """
    import numpy as np
    import torch

    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(num_bytes + CACHE_LINE, np.uint8))
    start = -memory.data_ptr() % CACHE_LINE
    return memory[start : start + num_bytes].view(dtype).view(*shape)


def host_zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``[size]`` zeros in host memory, for copies to or from ``device``; pinned if it is a GPU.

    Copies in CUDA graphs need pinned memory.
    """
    import torch

    return torch.zeros(size, dtype=dtype, pin_memory=device.type != "cpu")


def _gpu_count_text(count: int) -> str:
    return "this machine has no usable GPU" if count == 0 else f"this machine has {count} GPU(s)"


def _host_memory() -> tuple[int, int]:
    """Return total and available bytes of host memory, within the limits of the container and the process."""
    page_size = os.sysconf("SC_PAGE_SIZE")
    total = page_size * os.sysconf("SC_PHYS_PAGES")
    free = page_size * os.sysconf("SC_AVPHYS_PAGES")
    try:  # in contrast to sysconf, MemAvailable includes the page cache
        with open("/proc/meminfo") as meminfo:
            fields = dict(line.split(":", 1) for line in meminfo)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pass
    cgroup_limits = limits.memory()
    if cgroup_limits is not None:
        total, free = min(total, cgroup_limits[0]), min(free, cgroup_limits[1])
    process_limit, process_free = private_memory.limit(), private_memory.free()
    if process_limit is not None and process_free is not None:
        total, free = min(total, process_limit), min(free, process_free)
    return total, max(free, 0)
