"""`DeviceMemory`: measures the memory of a device whose memory is separate from the host's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class DeviceMemory(ABC):
    """Measures the free memory of one device, and the peak memory of work."""

    @abstractmethod
    def free(self) -> int:
        """Return the free bytes of the device, after freeing memory that is reserved but unused."""

    @abstractmethod
    def peak(self, work: Callable[[], object]) -> int:
        """Run ``work``, and return by how many bytes the peak of the memory in use exceeds the initial use.

        Raises:
            MemoryError: the device has too little memory for the work.
        """
