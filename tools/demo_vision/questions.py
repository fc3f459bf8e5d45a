"""Questions about pictures, and their answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from demo_vision.pictures import BACKGROUNDS, COLOURS, SHAPES, Scene, Thing

NUMBERS = ("no", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True, slots=True)
class Question:
    """A question of one kind, with its answer."""

    kind: str
    text: str
    answer: str


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def with_article(words: str) -> str:
    """Return words with ``a`` or ``an`` before them."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def english_list(parts: Iterable[str]) -> str:
    """Return parts as an English list: ``a, b and c``."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def there_are(count: int, noun: str) -> str:
    """Return a sentence such as ``There are two circles.``"""
    if count == 1:
        return f"There is one {noun}."
    return f"There are {NUMBERS[count]} {plural(noun)}."


def describe(scene: Scene) -> Question:
    """Return the answer to a question about the content of the picture. The question's text is empty."""
    counts = {(s, c): scene.count(s, c) for s in SHAPES for c in COLOURS}
    groups = [
        with_article(f"{colour} {shape}") if count == 1 else f"{NUMBERS[count]} {colour} {plural(shape)}"
        for (shape, colour), count in counts.items()
        if count
    ]
    if not groups:
        return Question("describe", "", "There is nothing in the picture.")
    verb = "is" if groups[0].startswith("a") else "are"
    return Question("describe", "", f"There {verb} {english_list(groups)}.")


def _ask_content(scene: Scene, rng: random.Random) -> Question:
    """Ask for the content of the picture, with a random wording."""
    texts = (
        "What is in the picture?",
        "What is in the picture?",
        "What is in this picture?",
        "What is in the image?",
        "What is in this image?",
        "What do you see?",
        "What do you see in the picture?",
        "What can you see?",
        "What does the picture show?",
        "What is this?",
        "Describe the picture.",
        "Describe this image.",
        "Describe the image.",
    )
    return Question("describe", rng.choice(texts), describe(scene).answer)


def _ask_total_count(scene: Scene, rng: random.Random) -> Question:
    """Ask for the number of all shapes."""
    noun = rng.choice(("shapes", "shapes", "things", "objects"))
    where = rng.choice(("", " are there", " are there", " do you see", " are in the picture", " can you see"))
    text = rng.choice((f"How many {noun}{where}?", f"Count the {noun}."))
    return Question("count", text, there_are(len(scene.things), "shape"))


def _ask_count(scene: Scene, rng: random.Random) -> Question:
    """Ask for the number of things of a shape, a colour or both."""
    shape, colour = _random_shape_and_colour(scene, rng)
    form = rng.random()
    if form < 0.5:
        colour = None
    elif form < 0.75:
        shape = None
    noun = " ".join(part for part in (colour, shape or "shape") if part)
    where = rng.choice(("", " are there", " are there", " do you see", " are in the picture", " can you see"))
    text = rng.choice((f"How many {plural(noun)}{where}?",) * 3 + (f"Count the {plural(noun)}.",))
    kind = "count of a shape" if colour is None else "count of a colour" if shape is None else "count of both"
    return Question(kind, text, there_are(scene.count(shape, colour), noun))


def _ask_colour(scene: Scene, rng: random.Random) -> Question | None:
    """Ask for the colour of a shape that occurs once, or does not occur."""
    unique_shapes = [shape for shape in SHAPES if scene.count(shape) == 1]
    absent = [shape for shape in SHAPES if not scene.count(shape)]
    if not unique_shapes or (absent and rng.random() < 0.12):
        if not absent:
            return None
        shape = rng.choice(absent)
        answer = f"There is no {shape}."
    else:
        shape = rng.choice(unique_shapes)
        (thing,) = (item for item in scene.things if item.shape == shape)
        answer = f"The {shape} is {thing.colour}."
    word = rng.choice(("colour", "color"))
    return Question(
        "colour", rng.choice((f"What {word} is the {shape}?", f"Which {word} has the {shape}?")), answer
    )


def _ask_shape(scene: Scene, rng: random.Random) -> Question | None:
    """Ask for the shape of a colour that occurs once, or does not occur."""
    unique_colours = [colour for colour in COLOURS if scene.count(None, colour) == 1]
    absent = [colour for colour in COLOURS if not scene.count(None, colour)]
    if not unique_colours or rng.random() < 0.12:
        colour = rng.choice(absent) if absent else None
        if colour is None:
            return None
        answer = f"There is no {colour} shape."
    else:
        colour = rng.choice(unique_colours)
        (thing,) = (item for item in scene.things if item.colour == colour)
        answer = f"The {colour} shape is {with_article(thing.shape)}."
    forms = (f"What shape is {colour}?", f"Which shape is {colour}?", f"What is {colour}?")
    return Question("shape", rng.choice(forms), answer)


def _ask_presence(scene: Scene, rng: random.Random) -> Question:
    """Ask whether a shape, a colour or both are in the picture."""
    shape, colour = _random_shape_and_colour(scene, rng)
    if rng.random() < 0.3:
        colour = None
    elif rng.random() < 0.2:
        shape = None
    noun = " ".join(part for part in (colour, shape or "shape") if part)
    count = scene.count(shape, colour)
    numbers = f"are {NUMBERS[count]} {plural(noun)}" if count > 1 else f"is {with_article(noun)}"
    answer = f"Yes, there {numbers}." if count else f"No, there is no {noun}."
    forms = (
        f"Is there {with_article(noun)}?",
        f"Is there {with_article(noun)} in the picture?",
        f"Do you see {with_article(noun)}?",
    )
    return Question("presence", rng.choice(forms), answer)


def _ask_place(scene: Scene, rng: random.Random) -> Question | None:
    """Ask for the place of a thing that occurs once and is not near a centre line of the picture."""
    candidates = [
        item
        for item in scene.things
        if scene.count(item.shape, item.colour) == 1 and min(abs(item.x - 0.5), abs(item.y - 0.5)) > 0.06
    ]
    if not candidates:
        return None
    thing = rng.choice(candidates)
    name = f"{thing.colour} {thing.shape}"
    if scene.count(thing.shape) == 1 and rng.random() < 0.5:
        name = thing.shape
    return Question("place", f"Where is the {name}?", f"The {name} is at the {_place(thing)}.")


def _ask_colours(scene: Scene, rng: random.Random) -> Question | None:
    """Ask for the colours of all shapes."""
    present_colours = [colour for colour in COLOURS if scene.count(None, colour)]
    if not present_colours:
        return None
    word = rng.choice(("colours", "colors"))
    forms = (f"What {word} do you see?", f"Which {word} do the shapes have?", f"What {word} are the shapes?")
    return Question("colours", rng.choice(forms), f"The shapes are {english_list(present_colours)}.")


def _ask_background(scene: Scene, rng: random.Random) -> Question:
    """Ask for the colour of the background."""
    word = rng.choice(("colour", "color"))
    forms = (f"What {word} is the background?", f"Which {word} has the background?")
    return Question("background", rng.choice(forms), f"The background is {scene.background}.")


def _place(thing: Thing) -> str:
    """Return the quarter of the picture, such as ``top left``."""
    return f"{'top' if thing.y < 0.5 else 'bottom'} {'left' if thing.x < 0.5 else 'right'}"


def _random_shape_and_colour(scene: Scene, rng: random.Random) -> tuple[str | None, str | None]:
    """Return a shape and a colour. In two of three cases, a thing in the scene has both."""
    if scene.things and rng.random() < 0.66:
        thing = rng.choice(scene.things)
        return thing.shape, thing.colour
    return rng.choice(SHAPES), rng.choice(list(COLOURS))


_KINDS: tuple[tuple[float, Callable[[Scene, random.Random], Question | None]], ...] = (
    (4, _ask_content),
    (3, _ask_total_count),
    (4, _ask_count),
    (2, _ask_colour),
    (2, _ask_shape),
    (2, _ask_presence),
    (1.5, _ask_place),
    (1, _ask_colours),
    (0.5, _ask_background),
)

WITHOUT_PICTURE = "I see no picture. Send me one with coloured shapes."
"""The answer to questions without a picture."""
GREETING = "Hello! Send me a picture with coloured shapes and ask me what is in it."
"""The answer to greetings without a picture."""


def ask(scene: Scene, rng: random.Random) -> Question:
    """Return a random question about a scene."""
    while True:
        _, make = rng.choices(_KINDS, weights=[weight for weight, _ in _KINDS])[0:1][0]
        question = make(scene, rng)
        if question is not None:
            return question


def vary_typing(text: str, rng: random.Random) -> str:
    """Return a question, sometimes in lower case or without its last character, as users type it."""
    if rng.random() < 0.12:
        text = text[:-1]
    if rng.random() < 0.15:
        text = text.lower()
    return text


def all_words() -> list[str]:
    """Return texts with the names of all shapes, colours and numbers, to train the tokenizer."""
    rng = random.Random(5)
    words = [*SHAPES, *map(plural, SHAPES), *COLOURS, *BACKGROUNDS, *NUMBERS]
    return [
        WITHOUT_PICTURE,
        GREETING,
        *(f"a {word}" for word in words),
        *(f"{rng.choice(words)}, {word}." for word in words),
    ]
