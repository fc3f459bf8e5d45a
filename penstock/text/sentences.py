"""Splits long texts at the ends of sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator

# ruff: noqa: RUF001
_SENTENCE = re.compile(r".+?(?:[.!?…。！？]+[\"'”’)\]]*(?=\s|$)|(?<=[。！？])|\n\s*\n|$)", re.DOTALL)
_CLAUSE = re.compile(r".+?(?:[,;:、，；](?=\s|$)|$)", re.DOTALL)
_WORD = re.compile(r"\S+\s*")


def split_text(text: str, max_characters: int, *, at_each_sentence: bool = False) -> list[str]:
    """Return parts of a text, each with whole sentences and at most ``max_characters`` characters.

    A sentence that is longer is split at commas, then between words, and a longer word anywhere. A text that
    fits is one part. The parts joined by spaces are the text, apart from white space. With
    ``at_each_sentence`` no part has more than one sentence.
    """
    text = text.strip()
    if at_each_sentence:
        sentences = _found(_SENTENCE, text)
        return [part for sentence in sentences for part in split_text(sentence, max_characters)]
    if len(text) <= max_characters:
        return [text] if text else []
    parts: list[str] = []
    for piece in _pieces(text, max_characters):
        if parts and len(parts[-1]) + 1 + len(piece) <= max_characters:
            parts[-1] += " " + piece
        else:
            parts.append(piece)
    return parts


def _pieces(text: str, limit: int) -> Iterator[str]:
    """Yield the largest pieces that fit: sentences, else clauses, else words, else characters."""
    for sentence in _found(_SENTENCE, text):
        if len(sentence) <= limit:
            yield sentence
            continue
        for clause in _found(_CLAUSE, sentence):
            if len(clause) <= limit:
                yield clause
                continue
            for word in _found(_WORD, clause):
                yield from (word[start : start + limit] for start in range(0, len(word), limit))


def _found(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    return (stripped for match in pattern.finditer(text) if (stripped := match.group().strip()))
