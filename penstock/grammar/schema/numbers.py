"""Converts numeric bounds to EBNF over decimal digits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from penstock.grammar.schema.ebnf import EMPTY, choice, literal, repeated, sequence

_DIGIT = "[0-9]"
_MAX_FRACTION_DIGITS = 17  # maximum digits after the decimal point of bounded numbers
_EXACT_DIGITS = 15  # different decimal numbers of at most 15 digits are different floats
# If the absolute value of a bound is at least this large, numbers with a fraction are restricted.
_LARGE_BOUND = Decimal(10**14)
_MAX_WITH_FRACTION = Decimal(10**9)  # maximum absolute value of restricted numbers with a fraction

ANY_INTEGER = '"-"? ("0" | [1-9] [0-9]*)'
ANY_NUMBER = f'{ANY_INTEGER} ("." [0-9]+)? ([eE] [+\\-]? ([0-9] | [1-9] [0-9] | [12] [0-9] [0-9]))?'


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval of numbers. None means no bound on that side.

    Attributes:
        excludes_low, excludes_high: whether the bound itself is excluded.
    """

    low: Decimal | None = None
    high: Decimal | None = None
    excludes_low: bool = False
    excludes_high: bool = False

    def contains(self, value: Decimal) -> bool:
        """Return whether the interval contains the value."""
        is_above_low = self.low is None or value > self.low or (value == self.low and not self.excludes_low)
        is_below_high = (
            self.high is None or value < self.high or (value == self.high and not self.excludes_high)
        )
        return is_above_low and is_below_high

    def intersection(self, other: Bounds) -> Bounds:
        """Return the intersection of two intervals."""
        low, excludes_low = max(
            ((bounds.low, bounds.excludes_low) for bounds in (self, other)),
            key=lambda bound: (bound[0] is not None, bound[0] or 0, bound[1]),
        )
        high, excludes_high = min(
            ((bounds.high, bounds.excludes_high) for bounds in (self, other)),
            key=lambda bound: (bound[0] is None, bound[0] or 0, not bound[1]),
        )
        return Bounds(low, high, excludes_low, excludes_high)

    @property
    def is_empty(self) -> bool:
        """Return whether the interval contains no number."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.excludes_low or self.excludes_high))

    def integers(self) -> tuple[int | None, int | None]:
        """Return (smallest, largest integer in the interval). None means no bound on that side."""
        low = high = None
        if self.low is not None:
            low = int(self.low.to_integral_value("ROUND_CEILING"))
            low += low == self.low and self.excludes_low
        if self.high is not None:
            high = int(self.high.to_integral_value("ROUND_FLOOR"))
            high -= high == self.high and self.excludes_high
        return low, high


UNBOUNDED = Bounds()


def integers_between(low: int | None, high: int | None) -> str | None:
    """Return an expression for the integers from ``low`` to ``high``; None if there are none."""
    if low is None and high is None:
        return ANY_INTEGER
    options: list[str] = []
    if low is None or low < 0:
        largest = -1 if high is None else min(high, -1)
        options += [sequence('"-"', option) for option in _naturals(-largest, None if low is None else -low)]
    if high is None or high >= 0:
        options += _naturals(max(low or 0, 0), high)
    return choice(options) if options else None


def numbers_between(bounds: Bounds) -> str | None:
    """Return an expression for the numbers in an interval; None if the expression would match no number.

    With a bound, the numbers have no exponent and at most `_MAX_FRACTION_DIGITS` digits after the decimal
    point. If a bound has 15 or more digits before the decimal point, only numbers from -10**9 to 10**9 may
    have a fraction.
    """
    if bounds.low is None and bounds.high is None:
        return ANY_NUMBER
    if any(bound is not None and bound.copy_abs() >= _LARGE_BOUND for bound in (bounds.low, bounds.high)):
        # Rounding to a float could move a number with a fraction, but not an integer, beyond such a bound.
        fraction_interval = bounds.intersection(Bounds(-_MAX_WITH_FRACTION, _MAX_WITH_FRACTION))
        fraction_expression = None if fraction_interval.is_empty else numbers_between(fraction_interval)
        parts = [
            part for part in (integers_between(*bounds.integers()), fraction_expression) if part is not None
        ]
        return choice(parts) if parts else None
    options: list[str] = []
    if bounds.low is None or bounds.low < 0 or (bounds.low == 0 and not bounds.excludes_low):
        if bounds.low is None or bounds.low < 0:
            negated_bounds = Bounds(
                # copy_negate, because the operator - rounds to 28 digits
                Decimal(0) if bounds.high is None or bounds.high > 0 else bounds.high.copy_negate(),
                None if bounds.low is None else bounds.low.copy_negate(),
                bounds.high is not None and bounds.high <= 0 and bounds.excludes_high,
                bounds.excludes_low,
            )
            options += [sequence('"-"', option) for option in _decimals(negated_bounds)]
    if bounds.high is None or bounds.high >= 0:
        is_positive = bounds.low is not None and bounds.low >= 0
        low = bounds.low if is_positive else Decimal(0)
        excludes_low = is_positive and bounds.excludes_low
        options += _decimals(Bounds(low, bounds.high, excludes_low, bounds.excludes_high))
    return choice(options) if options else None


def _naturals(low: int, high: int | None) -> list[str]:
    """Return alternatives for the integers from ``low``, at least 0, to ``high``."""
    options = []
    max_digits = len(str(low)) if high is None else len(str(high))
    for num_digits in range(len(str(low)), max_digits + 1):
        first = 0 if num_digits == 1 else 10 ** (num_digits - 1)
        last = 10**num_digits - 1 if high is None else min(high, 10**num_digits - 1)
        if max(low, first) <= last:
            options += _numbers_of_same_length(str(max(low, first)), str(last))
    if high is None:
        options.append(sequence("[1-9]", repeated(_DIGIT, max_digits, None)))
    return options


def _numbers_of_same_length(low: str, high: str) -> list[str]:
    """Return alternatives for the digit strings from ``low`` to ``high``. Both have the same length."""
    if not low:
        return [EMPTY]
    if low[0] == high[0]:
        return [sequence(literal(low[0]), suffix) for suffix in _numbers_of_same_length(low[1:], high[1:])]
    first, last = int(low[0]), int(high[0])
    num_more_digits = len(low) - 1
    options = []
    if low[1:].strip("0"):
        options += [
            sequence(literal(low[0]), suffix)
            for suffix in _numbers_of_same_length(low[1:], "9" * num_more_digits)
        ]
        first += 1
    last_options: list[str] = []
    if high[1:].strip("9"):
        last_options = [
            sequence(literal(high[0]), suffix)
            for suffix in _numbers_of_same_length("0" * num_more_digits, high[1:])
        ]
        last -= 1
    if first <= last:
        digit = literal(str(first)) if first == last else f"[{first}-{last}]"
        options.append(sequence(digit, repeated(_DIGIT, num_more_digits, num_more_digits)))
    return options + last_options


def _decimals(bounds: Bounds) -> Iterator[str]:
    """Yield alternatives for the numbers in an interval whose lower bound is at least 0."""
    assert bounds.low is not None
    if bounds.is_empty:
        return
    max_digits = _MAX_FRACTION_DIGITS
    if bounds.excludes_low or bounds.excludes_high:
        # A number with more digits that is close to an excluded bound could be the same float as the bound.
        integer = max(int(bounds.low), int(bounds.high or 0))
        max_digits = max(_EXACT_DIGITS - len(str(integer)), 1)
    low, low_fraction = _integer_and_fraction(bounds.low)
    high, high_fraction = (None, "") if bounds.high is None else _integer_and_fraction(bounds.high)
    low_bound = (low_fraction, bounds.excludes_low)
    high_bound = (high_fraction, bounds.excludes_high)
    if low == high:
        yield from _with_fraction(literal(str(low)), _fraction(low_bound, high_bound, max_digits))
        return
    yield from _with_fraction(literal(str(low)), _fraction(low_bound, None, max_digits))
    inner_integers = (
        _naturals(low + 1, None if high is None else high - 1) if high is None or high > low + 1 else []
    )
    if inner_integers:
        yield from _with_fraction(choice(inner_integers), _fraction(None, None, max_digits))
    if high is not None:
        yield from _with_fraction(literal(str(high)), _fraction(None, high_bound, max_digits))


def _integer_and_fraction(value: Decimal) -> tuple[int, str]:
    integer = int(value)
    fraction = format(value - integer, "f").partition(".")[2]
    return integer, fraction.rstrip("0")


def _with_fraction(integer: str, fraction: tuple[bool, str | None]) -> Iterator[str]:
    may_be_absent, digits = fraction
    if digits is not None:
        point = sequence('"."', digits)
        yield sequence(integer, repeated(point, 0, 1) if may_be_absent else point)
    elif may_be_absent:
        yield integer


_FractionBound = tuple[str, bool] | None  # (digits after the decimal point, whether the bound is exclusive)


def _fraction(low: _FractionBound, high: _FractionBound, max_digits: int) -> tuple[bool, str | None]:
    """Return (whether the fraction may be absent, expression of its digits; None if there are none)."""
    may_be_absent = _allows_zero(low, high)
    options = []
    if max_digits > 0:
        for first, last, next_low, next_high in _digit_ranges(low, high):
            if next_low is None and next_high is None:
                suffix: str | None = repeated(_DIGIT, 0, max_digits - 1)
            else:
                may_end, later_digits = _fraction(next_low, next_high, max_digits - 1)
                suffix = None if later_digits is None and not may_end else EMPTY
                if later_digits is not None:
                    suffix = repeated(later_digits, 0, 1) if may_end else later_digits
            if suffix is not None:
                digit = literal(str(first)) if first == last else f"[{first}-{last}]"
                options.append(sequence(digit, suffix))
    return may_be_absent, choice(options) if options else None


def _allows_zero(low: _FractionBound, high: _FractionBound) -> bool:
    """Return whether a fraction of zero is within both bounds."""
    is_above = low is None or (not low[0] and not low[1])
    return is_above and not (high is not None and not high[0] and high[1])


def _digit_ranges(
    low: _FractionBound, high: _FractionBound
) -> Iterator[tuple[int, int, _FractionBound, _FractionBound]]:
    """Yield (first, last, low, high): a range of the next digit, and the bounds of the digits after it."""
    if low is not None and not low[0] and not low[1]:
        low = None
    low_digit = 0 if low is None else int(low[0][:1] or "0")
    high_digit = 9 if high is None else int(high[0][:1] or "0")
    next_low: _FractionBound = None if low is None else (low[0][1:], low[1])
    next_high: _FractionBound = None if high is None else (high[0][1:], high[1])
    if low_digit == high_digit:
        yield low_digit, high_digit, next_low, next_high
        return
    if low_digit > high_digit:
        return
    first, last = low_digit, high_digit
    if low is not None:
        yield low_digit, low_digit, next_low, None
        first += 1
    if high is not None:
        last -= 1
    if first <= last:
        yield first, last, None, None
    if high is not None:
        yield high_digit, high_digit, None, next_high
