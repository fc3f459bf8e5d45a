"""`RefusedField`: describes a request field that the server does not support."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RefusedField:
    """A known but unsupported field. Values that request the server's normal behaviour are accepted."""

    reason: str
    """Why other values are refused. It is part of the error message."""
    accepted: tuple[object, ...] = ()
    """Accepted values. Null is always accepted, because it means that the field is absent."""
    accepts_all: bool = False
    """Whether every value is accepted, because the field can have no effect in this server."""
