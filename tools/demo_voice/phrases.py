"""Texts of the second training: common phrases in all punctuations, and numbers in words."""

from __future__ import annotations

import random

from penstock.text.english_numbers import cardinal, ordinal, year

from .sentences import listed, sentence

JUDGED = ("hello world", "hello", "hello there", "good morning")
"""Phrases whose speech is chosen from several candidates by a recogniser."""

COMMON = tuple(
    listed(
        """
        good evening, good night, good afternoon, goodbye, thank you, thank you very much, how are
        you, nice to meet you, see you later, see you tomorrow, yes, no, please, welcome, one two
        three, this is a test, my name is anna, what time is it, hi, hey, hi there, hello my friend,
        hello everyone, hello again, good day, bye, have a nice day, thanks, thanks a lot, you are
        welcome, excuse me, I am sorry, no problem, of course, of course not, maybe, okay, all
        right, that is right, that is good, very good, how are you today, I am fine, I am fine thank
        you, where are you, who are you, what is this, what is that, what is your name, how old are
        you, can you help me, I love you, I like it, I do not know, I know, I think so, let us go,
        come here, wait a minute, just a moment, this is a voice, this is a demo, testing, this is
        only a test, one two three four five, the quick brown fox jumps over the lazy dog, welcome
        to the world, the weather is nice today, it is raining, happy birthday, good luck, well
        done, see you soon, how much is it, where is the station, I would like a cup of coffee, the
        end, once upon a time, speech works, the sun is shining
        """
    )
)
"""Further phrases, whose speech is that of espeak-ng."""


def variants(phrase: str) -> list[str]:
    """Return a phrase with every end that it can have, and with a comma after a greeting."""
    ends = [phrase + end for end in ("", ".", "!", "?", "...", ":", ",")]
    first, _, rest = phrase.partition(" ")
    if first in ("hello", "hi", "thank") and rest and rest != "you":
        with_comma = f"{first}, {rest}" if first != "thank" else phrase
        ends += [with_comma + end for end in ("", ".", "!", "?")]
    return list(dict.fromkeys(ends))


def _number(rng: random.Random) -> str:
    kind = rng.choice(("small", "hundreds", "thousands", "year", "ordinal", "currency", "decimal", "percent"))
    if kind == "small":
        return cardinal(rng.randrange(0, 100))
    if kind == "hundreds":
        return cardinal(rng.randrange(100, 1000))
    if kind == "thousands":
        return cardinal(
            rng.choice((1000, 2000, 5000, 10_000, 20_000, 1_000_000, rng.randrange(1000, 10_000)))
        )
    if kind == "year":
        return year(rng.randrange(1800, 2050))
    if kind == "ordinal":
        return ordinal(rng.randrange(1, 32))
    if kind == "currency":
        amount = cardinal(rng.randrange(1, 200))
        return f"{amount} {rng.choice(('dollars', 'euros', 'pounds', 'cents'))}"
    if kind == "decimal":
        whole, tenths = divmod(rng.randrange(1, 1000), 10)
        return f"{cardinal(whole)} point {cardinal(tenths)}"
    return f"{cardinal(rng.randrange(0, 101))} percent"


_NUMBER_TEXTS = (
    "NUMBER",
    "NUMBER",
    "it costs NUMBER",
    "I have NUMBER",
    "in NUMBER",
    "there are NUMBER books",
    "the NUMBER of march",
    "NUMBER people",
    "the answer is NUMBER",
)


def number_texts(seed: int, count: int) -> list[str]:
    """Return distinct texts with numbers in words, all from zero to one hundred among them."""
    rng = random.Random(seed)
    texts = [*map(cardinal, range(101)), *map(ordinal, range(1, 32))]
    seen = set(texts)
    while len(texts) < count:
        text = rng.choice(_NUMBER_TEXTS).replace("NUMBER", _number(rng)) + rng.choice(("", ".", "."))
        if text not in seen:
            seen.add(text)
            texts.append(text)
    return texts


def pairs(seed: int, count: int) -> list[str]:
    """Return texts of two sentences: a phrase, then a phrase or a sentence of the grammar."""
    rng = random.Random(seed)
    known = [*JUDGED, *COMMON]
    texts = []
    for _ in range(count):
        first = rng.choice(known).capitalize() + rng.choice((".", "!", "?", "."))
        second = sentence(rng) if rng.random() < 0.5 else rng.choice(known).capitalize() + "."
        texts.append(f"{first} {second}")
    return texts
