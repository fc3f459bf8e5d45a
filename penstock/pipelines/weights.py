"""Re-exports `penstock.weights`. Names are resolved on first use: importing this module loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names

if TYPE_CHECKING:
    from penstock.weights import (
        Weights,
    )

__all__ = [
    "Weights",
]


if not TYPE_CHECKING:  # with __getattr__, type checkers would accept missing names
    __getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "penstock.weights"))
