"""Converts whole numbers to English words: cardinals, ordinals and years, without hyphens and commas."""

from __future__ import annotations

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_THOUSANDS = ("", "thousand", "million", "billion", "trillion", "quadrillion")
_IRREGULAR_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}

LARGEST = 10 ** (3 * len(_THOUSANDS)) - 1
"""The largest number that `cardinal` supports."""


def cardinal(number: int) -> str:
    """Return a number from 0 to `LARGEST` in words: 1234 is "one thousand two hundred and thirty four".

    Raises:
        ValueError: the number is outside this range.
    """
    if not 0 <= number <= LARGEST:
        raise ValueError(f"{number} cannot be written in words: the range is 0 to {LARGEST}")
    groups, remaining_number = [], number
    while remaining_number:
        remaining_number, group = divmod(remaining_number, 1000)
        groups.append(group)
    words = [
        f"{_below_thousand(group)} {_THOUSANDS[index]}".strip()
        for index, group in reversed(list(enumerate(groups)))
        if group
    ]
    if len(words) > 1 and 0 < number % 1000 < 100:
        words.insert(-1, "and")
    return " ".join(words) or _ONES[0]


def ordinal(number: int) -> str:
    """Return the ordinal of a number from 0 to `LARGEST` in words: 21 is "twenty first"."""
    first_words, _, last = cardinal(number).rpartition(" ")
    if last in _IRREGULAR_ORDINALS:
        last = _IRREGULAR_ORDINALS[last]
    else:
        last = f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th"
    return f"{first_words} {last}".strip()


def year(number: int) -> str:
    """Return a year from 1100 to 2099 in words: 1905 is "nineteen oh five", 2004 "two thousand and four"."""
    century, rest = divmod(number, 100)
    if century % 10 == 0 and rest < 10:
        return cardinal(number)
    if not rest:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    rest_words = _below_hundred(rest) if rest else ""
    if not hundreds:
        return rest_words
    hundreds_words = f"{_ONES[hundreds]} hundred"
    return f"{hundreds_words} and {rest_words}" if rest else hundreds_words


def _below_hundred(number: int) -> str:
    if number < len(_ONES):
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return f"{_TENS[tens - 2]} {_ONES[ones]}" if ones else _TENS[tens - 2]
