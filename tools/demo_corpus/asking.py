"""How people phrase a request: the same question polite, blunt, lower case or without its mark.

A stranger's first words rarely match a template, so most user turns of the corpus pass through
``roughen``.
"""

import random
from collections.abc import Sequence

from .words import pick, upper_first

BEFORE = [
    "Please ",
    "Can you ",
    "Could you ",
    "Could you please ",
    "I want you to ",
    "Now ",
    "Hi, ",
    "Hello! ",
]
AFTER = ["", "", "", ", please", " for me", " now"]
QUESTION_LEADS = [
    "Tell me, ",
    "Hi, ",
    "Hello, ",
    "Hey, ",
    "Do you know ",
    "Can you tell me ",
    "I wonder, ",
    "Quick question: ",
]


def roughen(rng: random.Random, text: str) -> str:
    """Type it the way people do: sometimes in lower case, sometimes without the last mark."""
    roll = rng.random()
    if roll < 0.15:
        text = text.lower()
    elif roll < 0.2:
        text = text[:1].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip("?.! ")
    return text


def question(rng: random.Random, options: Sequence[str]) -> str:
    """One of the questions, sometimes with a few words before it."""
    text = pick(rng, options)
    if rng.random() < 0.12:
        lead = pick(rng, QUESTION_LEADS)
        text = lead + (text if text.startswith("I ") else text[:1].lower() + text[1:])
    return roughen(rng, text)


def order(rng: random.Random, options: Sequence[str]) -> str:
    """One of the orders (given as ``Tell me ...``), sometimes wrapped in a courtesy."""
    text = pick(rng, options)
    if rng.random() < 0.35:
        before = pick(rng, BEFORE)
        text = before + text[:1].lower() + text[1:]
        if before.startswith(("Can", "Could")):
            return roughen(rng, text.rstrip(".") + "?")
    text = text.rstrip(".") + pick(rng, AFTER)
    return roughen(rng, upper_first(text) + ("" if text.endswith("?") else "."))
