"""Short stories from a small grammar: a hero, a friend, and one of the plots of ``texts/plots.txt``.

A plot is a list of steps, and a step is a list of paraphrases. A plot with eight steps therefore gives
thousands of stories. Fields in braces are replaced:

- ``n``, ``he``, ``him`` and ``his`` by the name and the pronouns of the hero,
- ``kind`` and ``desc`` by the kind of the hero (``knight``) and a description (``a brave knight``),
- ``fn``, ``fhe`` and so on by the same texts about the friend,
- ``place`` by a random place,
- every other field by a random value of the plot's slot with this name.

A capital letter (``He``, ``Fhe``) selects the form that begins a sentence.
"""

import random
from dataclasses import dataclass

from .texts import read_sections, split_alternatives
from .words import BOYS, CREATURES, GIRLS, NOUNS, PET_NAMES, PLACES, pick, strange_word, with_article


@dataclass(frozen=True)
class Character:
    """A character of a story: name, kind, and pronouns."""

    name: str
    kind: str
    adjective: str
    is_feminine: bool

    def fields(self, prefix: str) -> dict[str, str]:
        """Return the template fields of this character; each name begins with ``prefix``."""
        he, him, his = ("she", "her", "her") if self.is_feminine else ("he", "him", "his")
        words = {"n": self.name, "he": he, "him": him, "his": his, "kind": self.kind}
        words["desc"] = with_article(f"{self.adjective} {self.kind}")
        fields = {prefix + key: word for key, word in words.items()}
        for key in ("he", "his"):
            fields[(prefix + key).capitalize()] = words[key].capitalize()
        return fields


@dataclass(frozen=True)
class Plot:
    """The events of a story."""

    topic: str
    """The words with which a request names the plot."""
    slots: dict[str, list[str]]
    """Name of a field -> its possible values."""
    steps: list[list[str]]
    """Each step as a list of paraphrases."""


@dataclass(frozen=True)
class Story:
    """A story, and the hero and topic that a request for the story can mention."""

    text: str
    hero: Character
    topic: str


FEMININE_KINDS = ["girl", "girl", "girl", "princess", "queen"]
MASCULINE_KINDS = ["boy", "boy", "boy", "prince", "knight", "king"]
ADJECTIVES = ["little", "small", "kind", "brave", "young", "happy", "clever", "quiet"]
OPENINGS = [
    "Once upon a time, there was {desc} named {n}. {He} lived {place}.",
    "Once upon a time, {desc} named {n} lived {place}.",
    "Once there was {desc} named {n} who lived {place}.",
    "There once was {desc} called {n}. {He} lived {place}.",
    "{n} was {desc} who lived {place}.",
    "One day, {desc} named {n} woke up early. {He} lived {place}.",
]
FRIENDS = [
    "{His} best friend was {fdesc} named {fn}.",
    "{n} had a good friend, {fdesc} named {fn}.",
    "{He} often played with {fn}, {fdesc}.",
]
CLOSINGS = [
    "{n} smiled all the way home.",
    "That night, {n} slept very well.",
    "From that day on, {n} and {fn} were the best of friends.",
    "{n} was happy, and so was {fn}.",
    "It was the best day of the year.",
    "And they were happy for a long, long time.",
    "{n} never forgot that day.",
    "{n} and {fn} went home together, tired and happy.",
]


def read_plot(topic: str, lines: list[str]) -> Plot:
    """Parse a section of ``plots.txt``: lines with ``=>`` are slots, all other lines are steps."""
    slots = {"thing": [with_article(noun) for noun in NOUNS]} if topic == "{thing}" else {}
    steps = []
    for line in lines:
        name, arrow, fillers = line.partition(" => ")
        if arrow:
            slots[name] = split_alternatives(fillers)
        else:
            steps.append(split_alternatives(line))
    return Plot(topic, slots, steps)


PLOTS = [read_plot(topic, lines) for topic, lines in read_sections("plots").items()]
PLOTS.insert(0, PLOTS[0])  # the plot about a lost thing varies most, so it is twice as likely


def make_character(rng: random.Random, taken_name: str = "") -> Character:
    """Return a random person or animal whose name is not ``taken_name``."""
    if rng.random() < 0.55:
        is_feminine = rng.random() < 0.5
        names, kinds = (GIRLS, FEMININE_KINDS) if is_feminine else (BOYS, MASCULINE_KINDS)
        kind = pick(rng, kinds)
    else:
        names, kind, is_feminine = PET_NAMES, pick(rng, CREATURES), rng.random() < 0.5
    name = pick(rng, [name for name in names if name != taken_name])
    if rng.random() < 0.06:
        name = strange_word(rng).capitalize()
    return Character(name, kind, pick(rng, ADJECTIVES), is_feminine)


def make_story(rng: random.Random, *, short: bool = False) -> Story:
    """Return a story with a random plot, hero and friend. ``short`` leaves out the closing sentence."""
    hero = make_character(rng)
    friend = make_character(rng, taken_name=hero.name)
    plot = rng.choice(PLOTS)
    fields = hero.fields("") | friend.fields("f") | {"place": pick(rng, PLACES)}
    fields |= {slot: pick(rng, values) for slot, values in plot.slots.items()}
    lines = [pick(rng, OPENINGS)]
    if plot.topic != "friendship":  # in this plot the hero meets the friend later
        lines.append(pick(rng, FRIENDS))
    lines += [pick(rng, step) for step in plot.steps]
    if not short and rng.random() < 0.7:
        lines.append(pick(rng, CLOSINGS))
    return Story(" ".join(lines).format(**fields), hero, plot.topic.format(**fields))


def story_document(rng: random.Random) -> str:
    """Return a story as a document, sometimes with a closing line."""
    text = make_story(rng).text
    if rng.random() < 0.1:
        text += " " + pick(rng, ["The end.", "The End."])
    return text
