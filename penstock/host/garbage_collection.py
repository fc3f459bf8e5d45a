"""Garbage collection during imports and loads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection during imports and loads.

    Imports and loads create many long-lived objects. The collector would traverse them repeatedly, which
    takes a fifth of the start-up time of a small model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # moves all objects to the oldest generation without traversing them
            gc.enable()
