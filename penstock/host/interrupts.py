"""Deferral of Ctrl-C while code runs that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Defer the `KeyboardInterrupt` of a Ctrl-C to the end of the block; a second Ctrl-C raises at once.

    Yields a function that raises a deferred `KeyboardInterrupt`. A long block calls it at safe points. If the
    block raises an exception, a deferred `KeyboardInterrupt` is dropped. Does nothing outside the main
    thread, inside another such block, or if the program has its own handler.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    num_caught = 0

    def defer(_signal: int, _frame: FrameType | None) -> None:
        nonlocal num_caught
        num_caught += 1
        if num_caught > 1:
            raise KeyboardInterrupt

    def raise_deferred() -> None:
        if num_caught:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, defer)
    try:
        yield raise_deferred
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise_deferred()
