"""The priority of threads that must leave the cores to the model."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_NICENESS = 5  # low priority, but not so low that a model on all cores starves the thread


def lower_thread_priority() -> None:
    """Lower the priority of this thread on Linux, where setpriority accepts a thread id. Else do nothing."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
