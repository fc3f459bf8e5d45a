"""Questions and facts about Penstock and about the demo model, from ``texts/about_penstock.txt``."""

import random

from .answers import Pair
from .asking import vary_question
from .texts import parse_exchange, read_sections
from .words import pick

IDENTITY = [parse_exchange(line) for line in read_sections("about_penstock")["identity"]]
FACTS = [parse_exchange(line) for line in read_sections("about_penstock")["facts"]]
IDENTITY_ANSWER = IDENTITY[0][1][0]
PENSTOCK_DEFINITION = "Penstock is an LLM inference library and server in Python."


def penstock_pair(rng: random.Random) -> Pair:
    """Return a question about Penstock or about the demo model, and its answer."""
    requests, replies = rng.choice(IDENTITY if rng.random() < 0.35 else FACTS)
    return vary_question(rng, requests), pick(rng, replies)


def penstock_paragraph(rng: random.Random) -> str:
    """Return a few facts as plain text, which train completions of prompts that begin with "Penstock"."""
    first_replies = [replies[0] for _, replies in FACTS]
    facts = rng.sample([fact for fact in first_replies if "Penstock" in fact and "Yes" not in fact], 3)
    return f"{PENSTOCK_DEFINITION} " + " ".join(facts)
