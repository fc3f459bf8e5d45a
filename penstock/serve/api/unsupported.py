"""Known fields that the server does not support."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """A known field that is not supported, except for values that change nothing."""

    reason: str
    accepted: tuple[object, ...] = ()
    """Accepted values. Null, which means absent, is always accepted."""
    accepts_all: bool = False
    """Whether every value is accepted, because the field concerns a feature that the server does not have."""
