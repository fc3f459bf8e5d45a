"""Replaces numbers by English words, for speech models.

"$5.20" becomes "five dollars and twenty cents".

The first pattern of `_RULES` that matches a number determines how it is read: as an amount of money, a
percentage, a time, an ordinal, a decade, a year or a plain number.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.text.english_numbers import cardinal, ordinal, year

LANGUAGES = ("en",)
"""Languages whose numbers can be written as words."""

_MAX_DIGITS = 15
"""Maximum number of digits of a whole number that is read as a cardinal.

Longer numbers, and numbers of several digits that begin with 0, are read digit by digit.
"""
_NUMBER = r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?"
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_CURRENCIES = {  # symbol -> (unit, units, subunit, subunits)
    "$": ("dollar", "dollars", "cent", "cents"),
    "€": ("euro", "euros", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "¥": ("yen", "yen", "sen", "sen"),
}
_FULL_HOUR = ("o'clock", "hundred")  # words after the full hour: for the hours 1 to 12, for other hours
_MONEY = re.compile(
    rf"(?<![A-Za-z0-9])([{''.join(_CURRENCIES)}])\s?({_NUMBER})(?:\s(thousand|million|billion|trillion)\b)?"
)
_PERCENT = re.compile(rf"({_NUMBER})\s?%")
_TIME = re.compile(r"(?<![0-9:.])([01]?[0-9]|2[0-3]):([0-5][0-9])(?![0-9:])(?:\s?([AaPp])\.?[Mm]\b\.?)?")
_HOUR = re.compile(r"(?<![0-9:.])(1[0-2]|[1-9])\s?([AaPp])\.?[Mm]\b\.?")
_ORDINAL = re.compile(r"(?<![0-9.,])([0-9]{1,15})(?:st|nd|rd|th)\b")
_DECADE = re.compile(r"(?<![0-9.,])(1[1-9][0-9]0|20[0-9]0)s\b")
_YEAR = re.compile(
    rf"(?i)\b(in|since|until|till|before|after|of|from|by|year|early|late|mid|{_MONTHS})((?:,?\s[0-9]{{1,2}},)?\s)"
    r"(1[1-9][0-9]{2}|20[0-9]{2})(?![0-9]|[.,][0-9])"
)
_RANGE = re.compile(r"([0-9])\s?[-\u2013]\s?(?=[0-9])")
_NEGATIVE = re.compile(r"(?<![\w)])[-\u2212](?=[0-9])")
_ANY_NUMBER = re.compile(_NUMBER)


def spoken_numbers(text: str) -> str:
    """Return a text with its numbers as English words. A text without ASCII digits is unchanged."""
    if not re.search("[0-9]", text):
        return text
    for pattern, words in _RULES:
        text = pattern.sub(words, text)
    return text


def _whole_number_words(digits: str) -> str:
    if len(digits) > _MAX_DIGITS or (len(digits) > 1 and digits.startswith("0")):
        return " ".join(cardinal(int(digit)) for digit in digits)
    return cardinal(int(digits))


def _number_words(text: str) -> str:
    """Return the words of a number, which may have thousands separators and decimals."""
    integer, point, decimals = text.replace(",", "").partition(".")
    words = _whole_number_words(integer)
    return f"{words} point {' '.join(cardinal(int(digit)) for digit in decimals)}" if point else words


def _spaced_words(match: re.Match[str], words: str) -> str:
    """Return words, with a space on each side where ``match`` is next to a letter, as in "mp3"."""
    previous, next_character = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return f"{' ' if previous.isalpha() else ''}{words}{' ' if next_character.isalpha() else ''}"


def _money_words(match: re.Match[str]) -> str:
    singular, plural, minor_singular, minor_plural = _CURRENCIES[match[1]]
    integer, _, decimals = match[2].replace(",", "").partition(".")
    if match[3]:
        return f"{_number_words(match[2])} {match[3]} {plural}"
    if len(decimals) not in (0, 2):
        return f"{_number_words(match[2])} {plural}"
    parts = []
    if int(integer) or not int(decimals or 0):
        parts.append(f"{_whole_number_words(integer)} {singular if int(integer) == 1 else plural}")
    if int(decimals or 0):
        parts.append(f"{cardinal(int(decimals))} {minor_singular if int(decimals) == 1 else minor_plural}")
    return " and ".join(parts)


def _time_words(match: re.Match[str]) -> str:
    hour, minute = int(match[1]), int(match[2])
    if minute:
        words = f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)}"
        return f"{words} {match[3].lower()} m" if match[3] else words
    if match[3]:
        return f"{cardinal(hour)} {match[3].lower()} m"
    return f"{cardinal(hour)} {_FULL_HOUR[hour > 12 or not hour]}"


def _decade_words(match: re.Match[str]) -> str:
    words = year(int(match[1]))
    return f"{words[:-1]}ies" if words.endswith("y") else f"{words}s"


_RULES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (_MONEY, _money_words),
    (_PERCENT, lambda match: f"{_number_words(match[1])} percent"),
    (_TIME, _time_words),
    (_HOUR, lambda match: f"{cardinal(int(match[1]))} {match[2].lower()} m"),
    (_ORDINAL, lambda match: ordinal(int(match[1]))),
    (_DECADE, _decade_words),
    (_YEAR, lambda match: f"{match[1]}{match[2]}{year(int(match[3]))}"),
    (_NEGATIVE, lambda _: "minus "),
    (_RANGE, lambda match: f"{match[1]} to "),
    (_ANY_NUMBER, lambda match: _spaced_words(match, _number_words(match[0]))),
)
"""Patterns with their replacements, applied in this order."""
