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

    Yields a function that raises the deferred `KeyboardInterrupt`, if any. A long block calls this function
    at safe points. If the block raises an exception, the deferred `KeyboardInterrupt` is dropped. The context
    manager has no effect outside the main thread, inside another block of `deferred_interrupts`, or if the
    program has set its own SIGINT handler.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    num_interrupts = 0

    def defer(_signal: int, _frame: FrameType | None) -> None:
        nonlocal num_interrupts
        num_interrupts += 1
        if num_interrupts > 1:
            raise KeyboardInterrupt

    def raise_deferred() -> None:
        if num_interrupts:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, defer)
    try:
        yield raise_deferred
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise_deferred()
