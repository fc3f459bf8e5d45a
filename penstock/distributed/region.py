"""`SharedRegion`: memory that the ranks of one host share, for the collectives of the C++ kernels.

::

    header   64 bytes   abort flag, time limit, capacity, number of ranks
    control  per rank   64 bytes: the number of its last message, the number of sleeping threads
    buffers  per rank   two buffers of `CAPACITY` bytes, used alternately

``csrc/collectives.inl`` describes the protocol.
"""

from __future__ import annotations

import mmap
import os
import struct

import numpy as np
import torch
from torch import Tensor

CAPACITY = 1 << 20
"""Size of a buffer in bytes. Longer messages are sent in parts."""
_CACHE_LINE = 64


class SharedRegion:
    """Memory that the ranks of one host share.

    Args:
        descriptor: a file descriptor of `size` bytes, from `create`.
        world: the number of ranks.
    """

    def __init__(self, descriptor: int, world: int) -> None:
        self._memory = mmap.mmap(descriptor, self.size(world))
        self._array = np.frombuffer(self._memory, np.uint8)
        self._bytes = torch.from_numpy(self._array)
        self._world = world

    @staticmethod
    def size(world: int) -> int:
        """Return the bytes of the region."""
        return _CACHE_LINE * (1 + world) + 2 * world * CAPACITY

    @classmethod
    def create(cls, world: int, timeout: float) -> int | None:
        """Return the file descriptor of a new region; None if the system has no anonymous files.

        Args:
            world: the number of ranks.
            timeout: seconds that a collective waits for the other ranks.
        """
        if not hasattr(os, "memfd_create"):
            return None
        descriptor = os.memfd_create("penstock-ranks")
        os.ftruncate(descriptor, cls.size(world))
        header = struct.pack("4q", 0, int(timeout * 1e9), CAPACITY, world)
        os.pwrite(descriptor, header, 0)
        return descriptor

    @property
    def address(self) -> int:
        """Address of the region in this process."""
        return int(self._bytes.data_ptr())

    @property
    def buffers(self) -> list[Tensor]:
        """The two buffers of each rank, ``[2 * CAPACITY]`` uint8."""
        start = _CACHE_LINE * (1 + self._world)
        return list(self._bytes[start:].view(self._world, 2 * CAPACITY))

    @property
    def is_aborted(self) -> bool:
        """Whether the collectives of all ranks fail."""
        return bool(self._array[:8].view(np.int64)[0])

    def abort(self) -> None:
        """Make the collectives of all ranks fail. A sleeping rank wakes up within milliseconds."""
        self._array[:8].view(np.int64)[0] = 1
