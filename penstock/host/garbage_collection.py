"""Disables the garbage collector during imports and loads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Context manager that disables the garbage collector in its block, for imports and loads.

    Imports and loads create many long-lived objects. An enabled collector traverses these objects repeatedly,
    which takes a fifth of the start-up time of a small model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # after freeze(): moves all objects to the oldest generation, untraversed
            gc.enable()
