"""Threads with a low priority."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.host.priority import lower_thread_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority on Linux only")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_calling_thread_is_lowered() -> None:
    before = niceness()
    with ThreadPoolExecutor(1, initializer=lower_thread_priority) as pool:
        assert pool.submit(niceness).result() == max(before, 5)
    assert niceness() == before
