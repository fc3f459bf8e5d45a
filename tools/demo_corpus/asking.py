"""Varies the wording of requests: polite or direct, in lower case, without the last punctuation mark.

Real requests rarely match a template. Therefore most user turns of the corpus pass through `vary_typing`,
which changes about a third of them.
"""

import random
from collections.abc import Sequence

from .words import pick, upper_first

COMMAND_PREFIXES = [
    "Please ",
    "Can you ",
    "Could you ",
    "Could you please ",
    "I want you to ",
    "Now ",
    "Hi, ",
    "Hello! ",
]
COMMAND_SUFFIXES = ["", "", "", ", please", " for me", " now"]
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


def vary_typing(rng: random.Random, text: str) -> str:
    """Return a text, sometimes in lower case or without the last punctuation mark, as users type it."""
    roll = rng.random()
    if roll < 0.15:
        text = text.lower()
    elif roll < 0.2:
        text = text[:1].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip("?.! ")
    return text


def vary_question(rng: random.Random, options: Sequence[str]) -> str:
    """Return one of the questions, sometimes after words such as ``Can you tell me``."""
    text = pick(rng, options)
    if rng.random() < 0.12:
        lead = pick(rng, QUESTION_LEADS)
        text = lead + (text if text.startswith("I ") else text[:1].lower() + text[1:])
    return vary_typing(rng, text)


def vary_command(rng: random.Random, options: Sequence[str]) -> str:
    """Return one of the requests of the form ``Tell me ...``, sometimes with words such as ``Please``."""
    text = pick(rng, options)
    if rng.random() < 0.35:
        prefix = pick(rng, COMMAND_PREFIXES)
        text = prefix + text[:1].lower() + text[1:]
        if prefix.startswith(("Can", "Could")):
            return vary_typing(rng, text.rstrip(".") + "?")
    text = text.rstrip(".") + pick(rng, COMMAND_SUFFIXES)
    return vary_typing(rng, upper_first(text) + ("" if text.endswith("?") else "."))
