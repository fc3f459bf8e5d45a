"""Whether the system can allocate pages before their first write."""

from __future__ import annotations

import numpy as np

from penstock.host.memory import populate_pages


def can_populate_pages() -> bool:
    """Return whether `populate_pages` succeeds for a small array."""
    memory = np.zeros(1 << 16, np.uint8)
    return populate_pages(memory.ctypes.data, memory.nbytes)
