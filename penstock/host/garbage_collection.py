"""What every start has in common."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """No garbage is collected meanwhile, for imports and loads.

    What they make stays, and there is so much of it that the collector, which looks at all of it again and
    again, takes a fifth of the time until a small model is ready.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # to the oldest generation, without a look: else the next one is at all of it
            gc.enable()
