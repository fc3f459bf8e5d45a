"""`SharedRegion`: memory that the ranks of one host share, for the collectives of the C++ kernels.

::

    header   64 bytes   abort flag, time limit in ns, bytes of a buffer, number of ranks
    control  per rank   64 bytes: number of its last message, number of ranks that sleep until its next
    buffers  per rank   two buffers of `BUFFER_SIZE` bytes, for messages with even and with odd numbers

``csrc/collectives.inl`` describes the protocol.
"""

from __future__ import annotations

import mmap
import os
import struct

import numpy as np
import torch
from torch import Tensor

BUFFER_SIZE = 1 << 20
"""Size of a buffer in bytes. A longer tensor is sent as several messages."""
_CACHE_LINE = 64


class SharedRegion:
    """Memory that the ranks of one host share.

    Args:
        descriptor: the file descriptor of the memory, from `create`.
        world_size: the number of ranks.
    """

    def __init__(self, descriptor: int, world_size: int) -> None:
        self._memory = mmap.mmap(descriptor, self.num_bytes(world_size))
        self._array = np.frombuffer(self._memory, np.uint8)
        self._bytes = torch.from_numpy(self._array)
        self._world_size = world_size

    @staticmethod
    def num_bytes(world_size: int) -> int:
        """Return the size of the region in bytes."""
        return _CACHE_LINE * (1 + world_size) + 2 * world_size * BUFFER_SIZE

    @classmethod
    def create(cls, world_size: int, timeout: float) -> int | None:
        """Return the file descriptor of a new region; None if the system has no ``memfd_create``.

        Args:
            world_size: the number of ranks.
            timeout: seconds that a collective waits for the other ranks.
        """
        if not hasattr(os, "memfd_create"):
            return None
        descriptor = os.memfd_create("penstock-ranks")
        os.ftruncate(descriptor, cls.num_bytes(world_size))
        header = struct.pack("4q", 0, int(timeout * 1e9), BUFFER_SIZE, world_size)
        os.pwrite(descriptor, header, 0)
        return descriptor

    @property
    def address(self) -> int:
        """Address of the region in this process."""
        return int(self._bytes.data_ptr())

    @property
    def buffers(self) -> list[Tensor]:
        """One uint8 tensor ``[2 * BUFFER_SIZE]`` per rank, which contains the two buffers of the rank."""
        start = _CACHE_LINE * (1 + self._world_size)
        return list(self._bytes[start:].view(self._world_size, 2 * BUFFER_SIZE))

    @property
    def is_aborted(self) -> bool:
        """Whether a rank has called `abort`, or a collective has exceeded the time limit."""
        return bool(self._array[:8].view(np.int64)[0])

    def abort(self) -> None:
        """Make the collectives of all ranks fail, including a collective in which a rank is waiting."""
        self._array[:8].view(np.int64)[0] = 1
