"""`DeviceMemory`: measures the memory that work takes on a device with memory of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class DeviceMemory(ABC):
    """Counts the memory of one device."""

    @abstractmethod
    def free(self) -> int:
        """Return the free bytes of the device, after giving back memory that is reserved but not in use."""

    @abstractmethod
    def peak(self, work: Callable[[], object]) -> int:
        """Run work and return the most bytes that it took at once, beyond those taken before.

        Raises:
            MemoryError: the device has too little memory for the work.
        """
