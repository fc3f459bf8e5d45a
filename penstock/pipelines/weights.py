"""Re-exports `penstock.weights`. Names are resolved on first use: importing this module loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import penstock.weights

if TYPE_CHECKING:
    from penstock.weights import (
        Weights,
    )

__all__ = [
    "Weights",
]


if not TYPE_CHECKING:  # a type checker must report names that do not exist

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(penstock.weights, name)
