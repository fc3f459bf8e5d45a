"""Numbers as English words."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.english_numbers import MAX_CARDINAL, cardinal, ordinal, year
from penstock.text.spoken_numbers import spoken_numbers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no digits", "no digits"),
        ("I have 3 cats and 21 dogs.", "I have three cats and twenty one dogs."),
        ("$5.20, not €1", "five dollars and twenty cents, not one euro"),
        ("£1,234.05!", "one thousand two hundred and thirty four pounds and five pence!"),
        ("$3 million", "three million dollars"),
        ("$0.01", "one cent"),
        ("¥500", "five hundred yen"),
        ("$1.5", "one point five dollars"),
        ("100%", "one hundred percent"),
        ("In 1999 and in 2007", "In nineteen ninety nine and in two thousand and seven"),
        ("May 3, 2024", "May three, twenty twenty four"),
        ("1500 people since 1905", "one thousand five hundred people since nineteen oh five"),
        ("the 1990s", "the nineteen nineties"),
        (
            "the 1st, 2nd, 12th, 20th and 103rd",
            "the first, second, twelfth, twentieth and one hundred and third",
        ),
        (
            "at 7:30 pm, 7:05, 7:00 or 14:00",
            "at seven thirty p m, seven oh five, seven o'clock or fourteen hundred",
        ),
        ("5pm", "five p m"),
        ("3.14", "three point one four"),
        ("-5 degrees", "minus five degrees"),
        ("3-5 apples", "three to five apples"),
        ("mp3", "mp three"),
        ("007", "zero zero seven"),
        ("1,000,000", "one million"),
        ("1234567890123456", "one two three four five six seven eight nine zero one two three four five six"),
        ("Ten is 10.", "Ten is ten."),
    ],
)
def test_numbers_in_a_text_become_words(text: str, words: str) -> None:
    assert spoken_numbers(text) == words
    assert spoken_numbers(words) == words


def test_cardinals_ordinals_and_years_are_spelled_in_words() -> None:
    assert cardinal(0) == "zero"
    assert cardinal(115) == "one hundred and fifteen"
    assert cardinal(1_000_001) == "one million and one"
    assert cardinal(1_002_300) == "one million two thousand three hundred"
    assert cardinal(MAX_CARDINAL).startswith("nine hundred and ninety nine quadrillion")
    assert [ordinal(n) for n in (1, 5, 8, 9, 40, 100)] == [
        "first",
        "fifth",
        "eighth",
        "ninth",
        "fortieth",
        "one hundredth",
    ]
    assert [year(n) for n in (1900, 2000, 2010)] == ["nineteen hundred", "two thousand", "twenty ten"]
    for number in (-1, MAX_CARDINAL + 1):
        with pytest.raises(ValueError, match="cannot be written in words"):
            cardinal(number)


def test_numbers_below_20000_have_distinct_words() -> None:
    assert len({cardinal(number) for number in range(20_000)}) == 20_000


@given(st.text(alphabet="0123456789.,:-%$€ apmsthndr\u0661", max_size=40))
def test_no_ascii_digit_remains(text: str) -> None:
    assert not re.search("[0-9]", spoken_numbers(text))
