"""Generates the training documents of Penstock's demo model from a small grammar.

All text is original. ``make_documents(seed, count)`` returns the same documents every time for a seed.
Stories, facts and odd texts are plain text. The other documents are chats: lists of messages, some with
tools. The trainer renders chats with the chat template of the exported model.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from .about_penstock import penstock_pair, penstock_paragraph
from .answers import make_pair
from .chats import Message, chat_with_tools, missing_tool, several_turns, story_turn, turn, with_system
from .json_tasks import json_pair
from .odd_inputs import odd_input, odd_pair
from .stories import story_document
from .texts import read_sections
from .words import BOYS, CAPITALS, CITIES, GIRLS, JOBS, pick, with_article

__all__ = ["KIND_PERCENTAGES", "Document", "make_documents"]

# Percentage of the documents of each kind. Stories and tool chats are long: their share of the tokens is
# larger.
KIND_PERCENTAGES = {
    "story": 14,
    "plain facts": 2,
    "question": 25,
    "penstock": 12,
    "story chat": 11,
    "several turns": 10,
    "json": 9,
    "tool call": 9,
    "odd chat": 5,
    "odd text": 3,
}


@dataclass(frozen=True)
class Document:
    """One text of the corpus: either plain ``text`` or a chat of ``messages`` with its ``tools``."""

    kind: str
    text: str = ""
    messages: list[Message] = field(default_factory=list)
    tools: list[Message] = field(default_factory=list)


def plain_facts(rng: random.Random) -> str:
    """Return plain sentences for completions: capitals, a self-introduction, facts about Penstock."""
    roll = rng.random()
    if roll < 0.4:
        sampled_capitals = rng.sample(list(CAPITALS.items()), 4)
        return " ".join(f"The capital of {country} is {city}." for country, city in sampled_capitals)
    if roll < 0.7:
        return introduction(rng)
    if roll < 0.8:
        return pick(rng, read_sections("plain")["beginnings"])
    return penstock_paragraph(rng)


def introduction(rng: random.Random) -> str:
    """Return plain text in which a person introduces themselves."""
    name = pick(rng, GIRLS if rng.random() < 0.5 else BOYS)
    age, city, job = rng.randrange(20, 70), pick(rng, CITIES), with_article(pick(rng, JOBS))
    hobby = pick(rng, ["music", "books", "long walks", "cooking"])
    self_description = f"Hello, my name is {name}. I am {age} years old and live in {city}."
    return f"{self_description} I work as {job}, and I like {hobby}."


def tool_document(rng: random.Random) -> Document:
    """Return a chat with a list of tools."""
    messages, tools = missing_tool(rng) if rng.random() < 0.06 else chat_with_tools(rng)
    return Document("tool call", messages=messages, tools=tools)


def make_document(rng: random.Random, kind: str) -> Document:
    """Return one document of the given kind."""
    if kind == "story":
        return Document(kind, text=story_document(rng))
    if kind == "plain facts":
        return Document(kind, text=plain_facts(rng))
    if kind == "odd text":
        return Document(kind, text=odd_input(rng))
    if kind == "tool call":
        return tool_document(rng)
    if kind == "several turns":
        return Document(kind, messages=several_turns(rng))
    makers = {
        "question": lambda: turn(*make_pair(rng)),
        "penstock": lambda: turn(*penstock_pair(rng)),
        "story chat": lambda: story_turn(rng),
        "json": lambda: turn(*json_pair(rng)),
        "odd chat": lambda: turn(*odd_pair(rng)),
    }
    return Document(kind, messages=with_system(rng, makers[kind]()))


def make_documents(seed: int, count: int) -> Iterator[Document]:
    """Yield ``count`` documents of all kinds, in random order."""
    rng = random.Random(seed)
    kinds, weights = list(KIND_PERCENTAGES), list(KIND_PERCENTAGES.values())
    for _ in range(count):
        yield make_document(rng, rng.choices(kinds, weights)[0])
