"""Checkpoints: location (`hub`), headers (`safetensors`), formats (`formats`) and tensors (`tensors`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.weights.tensors import Weights

__all__ = ["Weights"]


if not TYPE_CHECKING:  # type checkers must notice unknown names

    def __getattr__(name: str) -> object:
        # Reading a header or finding a checkpoint needs no torch; `Weights` does.
        if name == "Weights":
            from penstock.weights.tensors import Weights

            return Weights
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
