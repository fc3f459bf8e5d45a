"""Checkpoints: finding and downloading them, and reading their tensors.

`hub` finds and downloads checkpoints, `safetensors` and `gguf` read file headers, `formats` supports
quantized checkpoints, and `tensors` reads the tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names

if TYPE_CHECKING:
    from penstock.weights.tensors import Weights

__all__ = ["Weights"]


if not TYPE_CHECKING:  # type checkers must notice unknown names
    # Reading a header or finding a checkpoint needs no torch; `Weights` does.
    __getattr__ = lazy_names(__name__, {"Weights": "penstock.weights.tensors"})
