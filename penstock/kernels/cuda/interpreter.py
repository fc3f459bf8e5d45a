"""Corrections of Triton's interpreter, which runs programs on CPU tensors with ``TRITON_INTERPRET=1``.

The interpreter stores bfloat16 numbers as integers with the same bits. Two of its operations therefore give
other results than a GPU: a conversion from or to bfloat16 truncates or reinterprets the bits, and a matrix
product multiplies the integers.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from functools import cache
from typing import Any, Protocol

import numpy as np


class _Type(Protocol):
    """A Triton type, such as bfloat16 or a block of bfloat16."""

    scalar: object


class _Handle(Protocol):
    """A value of Triton's interpreter."""

    data: np.ndarray
    dtype: _Type


@cache
def correct_bfloat16() -> None:
    """Replace the conversions and matrix products of the interpreter in this process by correct ones."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    original_cast, original_dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: object, src: _Handle, dst_type: _Type) -> object:
        source, target = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 not in (source, target) or source == target:
            return original_cast(self, src, dst_type)
        if source == tl.bfloat16:
            wide = interpreter.TensorHandle(_widen_bits(src.data), tl.float32)
            return wide if target == tl.float32 else original_cast(self, wide, dst_type)
        wide = src if source == tl.float32 else original_cast(self, src, tl.float32)
        return interpreter.TensorHandle(_round_to_bits(wide.data), target)

    def create_dot(self: object, a: _Handle, b: _Handle, *other_arguments: object) -> object:
        wide = [
            cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x  # exact
            for x in (a, b)
        ]
        return original_dot(self, *wide, *other_arguments)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot


def ignore_overflow() -> ExitStack:
    """Stop numpy's warnings of overflow and NaN until the returned context ends.

    A GPU does not warn either.
    """
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore", RuntimeWarning)
    stack.enter_context(np.errstate(all="ignore"))
    return stack


def _widen_bits(bits: np.ndarray) -> np.ndarray:
    wide: np.ndarray = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def _round_to_bits(x: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16, rounding half to even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    narrow: np.ndarray = np.where(is_nan, (bits >> np.uint32(16)) | np.uint32(64), rounded).astype(np.uint16)
    return narrow.reshape(np.shape(x))
