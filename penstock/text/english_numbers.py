"""Converts whole numbers to English words: cardinals, ordinals and years, without hyphens and commas."""

from __future__ import annotations

_BELOW_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_POWERS_OF_THOUSAND = ("", "thousand", "million", "billion", "trillion", "quadrillion")
_IRREGULAR_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}

MAX_CARDINAL = 10 ** (3 * len(_POWERS_OF_THOUSAND)) - 1
"""The largest number that `cardinal` supports."""


def cardinal(number: int) -> str:
    """Return a number from 0 to `MAX_CARDINAL` in words: 1234 is "one thousand two hundred and thirty four".

    Raises:
        ValueError: the number is negative or above `MAX_CARDINAL`.
    """
    if not 0 <= number <= MAX_CARDINAL:
        raise ValueError(f"{number} cannot be written in words: the range is 0 to {MAX_CARDINAL}")
    three_digit_groups, remaining_number = [], number  # the lowest group first
    while remaining_number:
        remaining_number, group = divmod(remaining_number, 1000)
        three_digit_groups.append(group)
    words = [
        f"{_below_thousand(group)} {_POWERS_OF_THOUSAND[index]}".strip()
        for index, group in reversed(list(enumerate(three_digit_groups)))
        if group
    ]
    if len(words) > 1 and 0 < number % 1000 < 100:
        words.insert(-1, "and")
    return " ".join(words) or _BELOW_TWENTY[0]


def ordinal(number: int) -> str:
    """Return the ordinal of a number from 0 to `MAX_CARDINAL` in words: 21 is "twenty first"."""
    first_words, _, last_word = cardinal(number).rpartition(" ")
    if last_word in _IRREGULAR_ORDINALS:
        last_word = _IRREGULAR_ORDINALS[last_word]
    else:
        last_word = f"{last_word[:-1]}ieth" if last_word.endswith("y") else f"{last_word}th"
    return f"{first_words} {last_word}".strip()


def year(number: int) -> str:
    """Return a year from 1100 to 2099 in words: 1905 is "nineteen oh five", 2004 "two thousand and four"."""
    century, last_two_digits = divmod(number, 100)
    if century % 10 == 0 and last_two_digits < 10:
        return cardinal(number)
    if not last_two_digits:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if last_two_digits < 10 else ''}{cardinal(last_two_digits)}"


def _below_thousand(number: int) -> str:
    hundreds, last_two_digits = divmod(number, 100)
    last_two_digits_words = _below_hundred(last_two_digits) if last_two_digits else ""
    if not hundreds:
        return last_two_digits_words
    hundreds_words = f"{_BELOW_TWENTY[hundreds]} hundred"
    return f"{hundreds_words} and {last_two_digits_words}" if last_two_digits else hundreds_words


def _below_hundred(number: int) -> str:
    if number < len(_BELOW_TWENTY):
        return _BELOW_TWENTY[number]
    tens, ones = divmod(number, 10)
    return f"{_TENS[tens - 2]} {_BELOW_TWENTY[ones]}" if ones else _TENS[tens - 2]
