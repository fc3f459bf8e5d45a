"""The machine's devices: what they are called, and how much memory they have.

This module, ``engine`` and ``kernels`` are the only places that know device names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.host import limits, private_memory
from penstock.host.memory import CACHE_LINE, num_reserved

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
    "load_devices",
    "scan_available_devices",
    "zeros",
]


if not TYPE_CHECKING:  # who checks types is to notice names that are not there

    def __getattr__(name: str) -> object:
        # A Buffer *is* a torch.Tensor; resolved on first use so that importing this module loads no torch.
        if name in ("Buffer", "Tensor"):
            import torch

            return torch.Tensor
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Names a device before it is opened: ``cpu``, ``gpu:0``."""

    id: int = 0
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        if self.device_type not in ("cpu", "gpu"):
            raise ConfigError("devices", f"unknown device type {self.device_type!r}: use cpu or gpu")
        if self.id < 0:
            raise ConfigError("devices", f"device id must not be negative, was {self.id}")

    @staticmethod
    def cpu(id: int = 0) -> DeviceSpec:
        """The host's processor."""
        return DeviceSpec(id, "cpu")

    @staticmethod
    def accelerator(id: int = 0) -> DeviceSpec:
        """The host's NVIDIA GPU number ``id``."""
        return DeviceSpec(id, "gpu")

    @property
    def is_host(self) -> bool:
        """Whether the device is the CPU of the host."""
        return self.device_type == "cpu"

    def __str__(self) -> str:
        return "cpu" if self.device_type == "cpu" else f"gpu:{self.id}"


@dataclass(frozen=True, slots=True)
class Device:
    """An opened device. Make one with `CPU`, `Accelerator` or `load_devices`."""

    spec: DeviceSpec

    @property
    def id(self) -> int:
        """The device's number among those of its kind."""
        return self.spec.id

    @property
    def is_host(self) -> bool:
        """Whether the device is the host's processor."""
        return self.spec.device_type == "cpu"

    @property
    def label(self) -> str:
        """``cpu`` or ``gpu``."""
        return self.spec.device_type

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        import torch

        return torch.device("cpu") if self.is_host else torch.device("cuda", self.id)

    @property
    def stats(self) -> Mapping[str, int]:
        """``total_memory`` and ``free_memory`` in bytes, as they are now."""
        if self.is_host:
            total, free = _host_memory()
            return {"total_memory": total, "free_memory": free}
        import torch

        free, total = torch.cuda.mem_get_info(self.id)
        return {"total_memory": total, "free_memory": free}

    def __str__(self) -> str:
        return str(self.spec)


def CPU(id: int = 0) -> Device:  # the page's name
    """The host's processor as a device."""
    return Device(DeviceSpec.cpu(id))


def Accelerator(id: int = 0) -> Device:  # the page's name
    """NVIDIA GPU number ``id`` as a device.

    Raises:
        ConfigError: there is no such GPU.
    """
    count = accelerator_count()
    if id >= count:
        raise ConfigError("devices", f"gpu:{id} does not exist, {_gpus(count)}: use --devices cpu")
    return Device(DeviceSpec.accelerator(id))


def accelerator_count() -> int:
    """How many NVIDIA GPUs torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def scan_available_devices() -> list[DeviceSpec]:
    """All GPUs of the host, or its processor where it has none."""
    return [DeviceSpec.accelerator(i) for i in range(accelerator_count())] or [DeviceSpec.cpu()]


def load_devices(specs: Sequence[DeviceSpec]) -> list[Device]:
    """Opens the devices named.

    Raises:
        ConfigError: one of them does not exist.
    """
    return [CPU() if spec.device_type == "cpu" else Accelerator(spec.id) for spec in specs]


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. In host memory a page of it is taken from the system when it is first written."""
    import numpy as np
    import torch

    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + CACHE_LINE, np.uint8))
    start = -memory.data_ptr() % CACHE_LINE
    return memory[start : start + size].view(dtype).view(*shape)


def _gpus(count: int) -> str:
    return "this machine has no usable GPU" if count == 0 else f"this machine has {count} GPU(s)"


def _host_memory() -> tuple[int, int]:
    """Return total and available bytes of host memory, within the limits of the container.

    Memory reserved for weights that are packed later does not count as available.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = page * os.sysconf("SC_AVPHYS_PAGES")
    try:  # what the page cache holds can be had, which sysconf does not count
        with open("/proc/meminfo") as meminfo:
            fields = dict(line.split(":", 1) for line in meminfo)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pass
    limit = limits.memory()
    if limit is not None:
        total, free = min(total, limit[0]), min(free, limit[1])
    private, left = private_memory.limit(), private_memory.free()
    if private is not None and left is not None:
        total, free = min(total, private), min(free, left)
    return total, max(free - num_reserved(), 0)
