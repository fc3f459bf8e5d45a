"""Splits long texts at the ends of sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator

# ruff: noqa: RUF001
_SENTENCE = re.compile(r".+?(?:[.!?…。！？]+[\"'”’)\]]*(?=\s|$)|(?<=[。！？])|\n\s*\n|$)", re.DOTALL)
_CLAUSE = re.compile(r".+?(?:[,;:、，；](?=\s|$)|$)", re.DOTALL)
_WORD = re.compile(r"\S+\s*")


def split_text(text: str, max_characters: int, *, at_each_sentence: bool = False) -> list[str]:
    """Split a text into parts of at most ``max_characters`` characters each, of whole sentences if possible.

    A sentence above the limit is split into clauses, at commas, semicolons and colons that white space
    follows. A clause above the limit is split between words, and a word above the limit after every
    ``max_characters`` characters. A text of white space has no parts. The parts contain all characters of the
    text in order, apart from white space. With ``at_each_sentence``, no part has more than one sentence;
    otherwise a text within the limit is one part.
    """
    text = text.strip()
    if at_each_sentence:
        sentences = _stripped_matches(_SENTENCE, text)
        return [part for sentence in sentences for part in split_text(sentence, max_characters)]
    if len(text) <= max_characters:
        return [text] if text else []
    parts: list[str] = []
    for text_unit in _largest_units(text, max_characters):
        if parts and len(parts[-1]) + 1 + len(text_unit) <= max_characters:
            parts[-1] += " " + text_unit
        else:
            parts.append(text_unit)
    return parts


def _largest_units(text: str, limit: int) -> Iterator[str]:
    """Yield the largest units that fit into the limit: sentences, clauses, words or parts of words."""
    for sentence in _stripped_matches(_SENTENCE, text):
        if len(sentence) <= limit:
            yield sentence
            continue
        for clause in _stripped_matches(_CLAUSE, sentence):
            if len(clause) <= limit:
                yield clause
                continue
            for word in _stripped_matches(_WORD, clause):
                yield from (word[start : start + limit] for start in range(0, len(word), limit))


def _stripped_matches(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    return (stripped_text for match in pattern.finditer(text) if (stripped_text := match.group().strip()))
