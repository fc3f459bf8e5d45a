"""Converts numbers of any type, such as numpy scalars, to plain Python numbers.

Messages to the worker contain plain Python numbers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from math import inf, nan
from numbers import Integral, Real
from typing import Protocol, TypeVar, cast

from penstock.errors import InputError

ValueT = TypeVar("ValueT")


class _Array(Protocol):
    """A numpy array; this module must not import numpy."""

    @property
    def ndim(self) -> int: ...
    def __iter__(self) -> Iterator[object]: ...


def plain(value: ValueT) -> ValueT:
    """Convert a real number or truth value to a plain Python value. Return other values unchanged.

    >>> plain(np.int64(5)), plain(np.float32(0.5)), plain(np.True_), plain("5")
    (5, 0.5, True, '5')
    """
    if value is None or type(value) in (int, float, bool):
        return value
    return cast(ValueT, _plain(value))


def _plain(value: object) -> object:
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)  # detected by the name of its type, because reading settings must not import numpy
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real | Decimal):  # Decimal is no subclass of Real
        try:
            return float(value)
        except OverflowError:  # a Fraction outside the range of floats
            return inf
        except ValueError:  # a signalling NaN
            return nan
    return value


def checked_integer(
    name: str,
    value: object,
    *,
    minimum: int = 0,
    maximum: int = 2**63 - 1,
    rule: str | None = None,
) -> int:
    """Return an integer of any type, except bool, as a plain ``int``.

    Raises:
        InputError: the value is not an integer, or not in ``[minimum, maximum]``. ``rule`` describes the
            valid values in the message; by default "an integer of at least ``minimum``".
    """
    number = plain(value)
    if type(number) is not int or not minimum <= number <= maximum:
        rule = f"an integer of at least {minimum}" if rule is None else rule
        raise InputError(f"{name} must be {rule}, was {value!r}")
    return number


def checked_number(name: str, value: object, low: float, high: float) -> float:
    """Return a real number of any type, except bool, as a plain ``int`` or ``float``.

    Raises:
        InputError: the value is not a number, is NaN, or is not in ``[low, high]``.
    """
    number = plain_real(value)
    if number is None:
        raise InputError(f"{name} must be a number in [{low}, {high}], was {value!r}")
    if not low <= number <= high:  # false for NaN
        raise InputError(f"{name} must be in [{low}, {high}], was {value!r}")
    return number


def plain_real(value: object) -> float | None:
    """Return a real number of any type, except bool, as a plain ``int`` or ``float``; otherwise None."""
    number = plain(value)
    return number if isinstance(number, int | float) and not isinstance(number, bool) else None


def checked_flag(name: str, value: object) -> bool:
    """Return a Python or numpy truth value as a plain ``bool``.

    Raises:
        InputError: the value is not a truth value.
    """
    flag = plain(value)
    if type(flag) is not bool:
        raise InputError(f"{name} must be True or False, was {value!r}")
    return flag


def checked_ids(name: str, ids: object) -> list[int] | None:
    """Return token ids from a list, tuple or array as a list of plain ``int``. Return None for None.

    Raises:
        InputError: the value is not a list, tuple or array of integers, or an id is not in ``[0, 2**63)``.
    """
    if ids is None:
        return None
    numbers = _elements(ids)
    integers = [number for number in numbers or () if type(number) is int]
    if numbers is None or len(integers) < len(numbers):
        raise InputError(f"{name} must be a list of token ids, was {ids!r}")
    if integers and not 0 <= min(integers) <= max(integers) < 2**63:
        checked_integer(name, min(integers) if min(integers) < 0 else max(integers))
    return integers


def _elements(values: object) -> list[object] | None:
    """Return the plain elements of a list, tuple or one-dimensional array; otherwise None."""
    if isinstance(values, list | tuple):
        return [plain(item) for item in values]
    kind = type(values)
    if kind.__module__ != "numpy" or kind.__name__ != "ndarray":
        return None
    array = cast(_Array, values)
    return [plain(item) for item in array] if array.ndim == 1 else None
