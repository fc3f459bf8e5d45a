"""The sources of the loader: `TensorSource`, and layers that were packed before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

from penstock.kernels import LinearSlice, PackedLinear

TakePacked = Callable[[str, tuple[int, int], Tensor | None, Sequence[LinearSlice]], PackedLinear | None]
"""Given encoding, ``(out, in)``, bias and slices, returns the next layer of the load, or None if it was not
packed before."""

Deferred = Literal["none", "calibrated", "all"]
"""Layers whose packing is deferred: none, those that need calibration, or all for which it is possible."""


class TensorSource(Protocol):
    """Named tensors, such as `penstock.weights.Weights`."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor as floats; it must have this shape."""
        ...

    def expect(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the tensor exists in this shape, without reading its numbers."""
        ...

    def stored_encoding(self, name: str) -> str | None:
        """Return the encoding in which a weight is stored; None if it is stored as floats."""
        ...

    def input_order(self, name: str) -> bytes:
        """Return the stored order of the inputs of a weight, int32; empty for the original order."""
        ...

    def read_linear(
        self, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        """Return the weight of a linear layer in its stored encoding.

        The tensors are those of `LinearEncoding.pack`, with inputs in the order of `input_order`. If the
        weight is not stored in an encoding, None and ``weight [out, in]`` as floats are returned. ``shape``
        is ``(out, in)``, also if the stored shape is ``transposed``.
        """
        ...

    def rows(
        self, name: str, shape: tuple[int, int], start: int, stop: int
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        """Return the rows ``start`` to ``stop - 1`` of a weight ``shape``, in the form of `read_linear`."""
        ...

    def is_mapped(self, name: str) -> bool:
        """Return whether `tensor` returns a view of the mapped file instead of a copy."""
        ...

    def release(self, name: str) -> None:
        """Release the memory of a tensor's file pages, after the tensor has been packed."""
        ...
