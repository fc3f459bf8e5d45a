"""`DeviceMemory`: measures the memory usage of work on a device with separate memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class DeviceMemory(ABC):
    """Counts the memory of one device."""

    @abstractmethod
    def free(self) -> int:
        """Return the free bytes of the device, after releasing reserved but unused memory."""

    @abstractmethod
    def peak(self, work: Callable[[], object]) -> int:
        """Run work and return its peak memory in bytes, in addition to the memory in use before.

        Raises:
            MemoryError: the device has too little memory for the work.
        """
