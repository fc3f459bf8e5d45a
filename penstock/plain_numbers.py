"""Conversion of numbers of any type, such as numpy scalars, to plain Python numbers.

Messages to the worker contain plain Python numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from numbers import Integral, Real
from typing import Any

from penstock.errors import InputError


def plain(value: Any) -> Any:
    """Convert a number or truth value to a plain one. Return other values unchanged.

    >>> plain(np.int64(5)), plain(np.float32(0.5)), plain(np.True_), plain("5")
    (5, 0.5, True, '5')
    """
    if type(value) in (int, float, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)  # detected by name: reading settings must not import numpy
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:  # a fraction beyond the range of floats
            return inf
    return value


def checked_integer(
    name: str,
    value: Any,
    *,
    minimum: int = 0,
    maximum: int = 2**63 - 1,
    rule: str | None = None,
) -> int:
    """Return an integer of any type, except bool, as a plain ``int``.

    Raises:
        InputError: the value is no integer, or not in ``[minimum, maximum]``. The message contains ``rule``.
    """
    number = plain(value)
    if type(number) is not int or not minimum <= number <= maximum:
        rule = f"an integer of at least {minimum}" if rule is None else rule
        raise InputError(f"{name} must be {rule}, was {value!r}")
    return number


def checked_number(name: str, value: Any, low: float, high: float) -> float:
    """Return a real number of any type, except bool, as a plain ``int`` or ``float``.

    Raises:
        InputError: the value is no number, is NaN, or is not in ``[low, high]``.
    """
    number = plain(value)
    if type(number) not in (int, float) or not low <= number <= high:  # false for NaN
        raise InputError(f"{name} must be in [{low}, {high}], was {value!r}")
    return number  # type: ignore[no-any-return]


def checked_flag(name: str, value: Any) -> bool:
    """Return a Python or numpy truth value as a plain ``bool``.

    Raises:
        InputError: the value is no truth value.
    """
    flag = plain(value)
    if type(flag) is not bool:
        raise InputError(f"{name} must be True or False, was {value!r}")
    return flag


def checked_ids(name: str, ids: Any) -> list[int] | None:
    """Return token ids from a list, tuple or array as a list of plain ``int``. Return None for None.

    Raises:
        InputError: the value is no sequence of integers, or an id is out of range.
    """
    if ids is None:
        return None
    numbers = _elements(ids)
    if numbers is None or not all(type(number) is int for number in numbers):
        raise InputError(f"{name} must be a list of token ids, was {ids!r}")
    if numbers and not 0 <= min(numbers) <= max(numbers) < 2**63:
        checked_integer(name, min(numbers) if min(numbers) < 0 else max(numbers))
    return numbers


def _elements(values: Any) -> list[Any] | None:
    kind = type(values)
    is_array = kind.__module__ == "numpy" and kind.__name__ == "ndarray" and values.ndim == 1
    if not is_array and not isinstance(values, list | tuple):
        return None
    items: Iterable[Any] = values
    return [plain(item) for item in items]
