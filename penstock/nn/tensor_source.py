"""Interfaces of the loader: `TensorSource` for checkpoints, `LoadPacked` for files of packed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

from penstock.kernels import LinearSlice, PackedLinear

LoadPacked = Callable[[str, tuple[int, int], Tensor | None, Sequence[LinearSlice]], PackedLinear | None]
"""Returns the next layer, in load order, from a file of packed weights; None if the file's next layer is
another one, or if the file has no next layer.

The arguments are the encoding, ``(out, in)``, the bias and the slices of the layer."""

LazyLayers = Literal["none", "calibrated", "all"]
"""Which layers are packed lazily: none, those that need calibration, or all whose encoding allows it."""


class TensorSource(Protocol):
    """The named tensors of a checkpoint; `penstock.weights.Weights` implements it."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of this shape, dequantized to floats."""
        ...

    def expect(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this name and shape exists; if not, record a fault. No data is read."""
        ...

    def stored_encoding(self, name: str) -> str | None:
        """Return the encoding in which a weight is stored; None if it is stored as floats or is missing."""
        ...

    def input_order(self, name: str) -> bytes:
        """Return the stored order of the inputs of a weight, int32; empty for the original order."""
        ...

    def read_linear(
        self, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        """Return the stored encoding of a linear layer's weight, and the tensors of the weight.

        The tensors are those that `LinearEncoding.pack` returns. Their inputs are in the order of
        `input_order`. If the weight is stored as floats, or in a layout that the encoding does not support,
        the encoding is None, and the only tensor is ``weight [out, in]``.
        ``shape`` is ``(out, in)``. If ``transposed``, the stored shape is ``(in, out)``.
        """
        ...

    def rows(
        self, name: str, shape: tuple[int, int], start: int, stop: int
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        """Return the same as `read_linear`, for the rows ``start`` to ``stop - 1`` of the weight only."""
        ...

    def is_mapped(self, name: str) -> bool:
        """Return whether `tensor` returns a view of the mapped file instead of a copy."""
        ...

    def release(self, name: str) -> None:
        """Drop the pages of a tensor from the resident memory, after the tensor has been packed."""
        ...
