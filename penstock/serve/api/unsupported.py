"""Known fields that the server does not support."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """A known but unsupported field. Values that request the server's normal behaviour are accepted."""

    reason: str
    accepted: tuple[object, ...] = ()
    """Accepted values. Null, which means absent, is always accepted."""
    accepts_all: bool = False
    """Whether every value is accepted, because the field concerns a feature that the server does not have."""
