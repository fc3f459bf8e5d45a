"""Ctrl-C, held back while bookkeeping is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Lets the block end before Ctrl-C becomes a `KeyboardInterrupt`; a second Ctrl-C passes at once.

    A block that goes on for long calls what it is given wherever a held Ctrl-C may pass. Does nothing outside
    the main thread, inside another such block, or where somebody has a handler of their own.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    num_caught = 0

    def hold(_signal: int, _frame: FrameType | None) -> None:
        nonlocal num_caught
        num_caught += 1
        if num_caught > 1:
            raise KeyboardInterrupt

    def let_through() -> None:
        if num_caught:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    let_through()
