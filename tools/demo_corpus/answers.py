"""Questions with short answers: small talk, simple facts, and questions that the model cannot answer.

Each function of `MAKERS` returns a pair (question, answer). Most answers have one or two sentences. Each fact
has only a few wordings, so that a small model can learn it.
"""

import random
from collections.abc import Callable
from typing import Any

from .asking import vary_command, vary_question, vary_typing
from .texts import parse_exchange, read_sections, read_table, request, split_alternatives
from .words import (
    CAPITALS,
    CITIES,
    COLORS,
    CREATURES,
    DAYS,
    FRUITS,
    JOBS,
    MONTHS,
    NOUNS,
    NUMBERS,
    PEOPLE,
    PET_NAMES,
    VEGETABLES,
    join_list,
    pick,
    plural,
    some_city,
    some_name,
    strange_word,
    upper_first,
    with_article,
)

Pair = tuple[str, str]

SMALL_TALK = [parse_exchange(line) for line in read_sections("small_talk")["small talk"]]
GREETINGS, GREETING_REPLIES = parse_exchange(read_sections("small_talk")["greetings"][0])
ANIMAL_FACTS = {name: split_alternatives(facts) for name, facts in read_table("facts", "animals").items()}
SEASONS = read_table("facts", "seasons")
BIG_AND_SMALL = ["elephant", "horse", "sheep", "dog", "cat", "rabbit", "mouse", "ant"]
FAST_AND_SLOW = ["plane", "train", "car", "bicycle", "turtle", "snail"]
SUBJECTS = split_alternatives(
    "a dog | a cat | the sea | summer | winter | a tree | the moon | rain | a bird | my house | a train | "
    "the sun | a horse | school | music | a garden | bread | a river"
)
UNKNOWN_PHRASES = {name: split_alternatives(lines[0]) for name, lines in read_sections("unknown").items()}
UNKNOWN_REPLIES = UNKNOWN_PHRASES["replies"]


def random_row(rng: random.Random, section: str) -> tuple[str, str]:
    """Return a random row of a table of ``facts.txt``."""
    return rng.choice(list(read_table("facts", section).items()))


def ask(rng: random.Random, section: str, **fields: Any) -> Pair:
    """Return a question of a section of ``requests.txt``, and the answer of this section."""
    requests, replies = request(section, **fields)
    return vary_question(rng, requests), replies[0]


def greeting(rng: random.Random) -> Pair:
    """Return a greeting and an answer that offers help."""
    return pick(rng, GREETINGS), pick(rng, GREETING_REPLIES)


def small_talk(rng: random.Random) -> Pair:
    """Return a question and an answer of ``small_talk.txt``."""
    requests, replies = rng.choice(SMALL_TALK)
    return vary_question(rng, requests), pick(rng, replies)


def capital(rng: random.Random) -> Pair:
    """Ask for the capital of a country, or the country of a capital."""
    country, city = rng.choice(list(CAPITALS.items()))
    section = "country of a capital" if rng.random() < 0.2 else "capital"
    return ask(rng, section, country=country, city=city)


def animal(rng: random.Random) -> Pair:
    """Ask for the sound, the food, the home or the young of an animal."""
    name, (says, young, eats, home) = rng.choice(list(ANIMAL_FACTS.items()))
    section = pick(rng, ["animal says", "animal young", "animal eats", "animal home", "animal"])
    plural_name = name if name == "sheep" else plural(name)
    return ask(
        rng,
        section,
        name=name,
        an=with_article(name),
        many=plural_name,
        says=says,
        a_young=with_article(young),
        eats=eats,
        home=home,
    )


def legs(rng: random.Random) -> Pair:
    """Ask how many legs an animal has."""
    name, count = random_row(rng, "legs")
    return ask(rng, "legs", an=with_article(name), number=NUMBERS[int(count)] if count != "0" else "no")


def thing_color(rng: random.Random) -> Pair:
    """Ask for the color of a well-known thing, spelled "color" or "colour"."""
    thing, color = random_row(rng, "colors")
    return ask(rng, "color", thing=thing, color=color, word=pick(rng, ["color", "colour"]))


def opposite(rng: random.Random) -> Pair:
    """Ask for the opposite of a word."""
    words = read_table("facts", "opposites")
    word, answer = rng.choice(list(words.items()))
    if word not in {"old", "young"} and rng.random() < 0.5 and answer not in words:
        word, answer = answer, word
    return ask(rng, "opposite", word=word, answer=answer)


def calendar(rng: random.Random) -> Pair:
    """Ask for the day or month before or after a given day or month."""
    names, what = (DAYS, "day") if rng.random() < 0.6 else (MONTHS, "month")
    index = rng.randrange(len(names))
    step, word = (1, "after") if rng.random() < 0.6 else (-1, "before")
    answer = names[(index + step) % len(names)]
    return ask(rng, "calendar", what=what, word=word, name=names[index], answer=answer)


def small_sum(rng: random.Random) -> Pair:
    """Ask for a sum, a difference or a small product."""
    first, second, roll = rng.randrange(21), rng.randrange(21), rng.random()
    if roll < 0.6:
        sign, word, result = "+", "plus", first + second
    elif roll < 0.85:
        first, second = max(first, second), min(first, second)
        sign, word, result = "-", "minus", first - second
    else:
        first, second = rng.randrange(1, 11), rng.randrange(1, 11)
        sign, word, result = pick(rng, ["*", "x"]), "times", first * second
    return ask(rng, "sum", first=first, second=second, sign=sign, word=word, result=result)


def thing_purpose(rng: random.Random) -> Pair:
    """Ask what a thing is for."""
    thing, purpose = random_row(rng, "uses")
    return ask(rng, "use", thing=thing, purpose=purpose)


def definition(rng: random.Random) -> Pair:
    """Ask what a thing is."""
    thing, meaning = rng.choice(list((read_table("facts", "definitions") | SEASONS).items()))
    return ask(rng, "definition", thing=thing, meaning=meaning, last_word=thing.split()[-1])


def compare(rng: random.Random) -> Pair:
    """Ask which of two things is bigger, smaller, faster or slower."""
    is_size = rng.random() < 0.6
    names, more, less = (
        (BIG_AND_SMALL, "bigger", "smaller") if is_size else (FAST_AND_SLOW, "faster", "slower")
    )
    first, second = rng.sample(range(len(names)), 2)
    word, winner = (more, min(first, second)) if rng.random() < 0.6 else (less, max(first, second))
    loser = first + second - winner
    fields = {"first": first, "second": second, "winner": winner, "loser": loser}
    return ask(
        rng, "compare", word=word, **{key: with_article(names[index]) for key, index in fields.items()}
    )


def number_fact(rng: random.Random) -> Pair:
    """Ask how many of something there are."""
    what, reply = random_row(rng, "how many")
    return ask(rng, "how many", what=what, reply=reply)


def why_and_how(rng: random.Random) -> Pair:
    """Ask for a reason or for a recipe."""
    section = "why" if rng.random() < 0.5 else "how do I"
    what, reply = random_row(rng, section)
    return ask(rng, section, what=what, reply=reply)


def listing(rng: random.Random) -> Pair:
    """Ask for a list of things of a kind, or to count to a number."""
    kinds = {
        "fruits": FRUITS,
        "vegetables": VEGETABLES,
        "colors": COLORS,
        "cities": CITIES,
        "jobs": JOBS,
        "animals": list(ANIMAL_FACTS),
        "days of the week": DAYS,
        "months": MONTHS,
    }
    count = rng.randrange(2, 6)
    if rng.random() < 0.2:
        end = rng.randrange(3, 11)
        requests, _ = request("count", word=NUMBERS[end], end=end)
        return vary_command(rng, requests), f"{join_list(NUMBERS[1 : end + 1])}.".capitalize()
    kind = pick(rng, list(kinds))
    is_ordered = kind in {"days of the week", "months"}
    items = join_list(kinds[kind][:count] if is_ordered else rng.sample(kinds[kind], count))
    requests, replies = request("name some", word=NUMBERS[count], count=count, kind=kind, items=items)
    return vary_command(rng, requests), replies[0]


def season(rng: random.Random) -> Pair:
    """Ask for the names of the seasons, or for the season after a given season."""
    names = list(SEASONS)
    index = rng.randrange(4)
    if rng.random() < 0.4:
        return ask(rng, "seasons")
    return ask(rng, "season after", name=names[index], answer=names[(index + 1) % 4])


def poem(rng: random.Random) -> Pair:
    """Ask for a poem of four lines."""
    subject, lines = random_row(rng, "poems")
    requests, _ = request("poem" if rng.random() < 0.3 else "poem about", subject=subject)
    return vary_command(rng, requests), "\n".join(split_alternatives(lines))


def sentence(rng: random.Random) -> Pair:
    """Ask for one sentence about a subject."""
    requests, replies = request("sentence", subject=pick(rng, SUBJECTS))
    return vary_command(rng, requests), upper_first(pick(rng, replies))


def repeat(rng: random.Random) -> Pair:
    """Ask the model to repeat given words."""
    random_words = [pick(rng, words) for words in (COLORS, FRUITS, PEOPLE, CITIES)]
    fixed_words = ["hello", "yes", "good morning", "hello world"]
    words = pick(rng, [*random_words, *fixed_words, " ".join(rng.sample(COLORS + FRUITS, 3))])
    requests, _ = request("repeat", words=words)
    return vary_command(rng, requests), upper_first(words) + "."


def unknown(rng: random.Random) -> Pair:
    """Return a question that the model cannot answer, and an answer that says so."""
    roll, word = rng.random(), strange_word(rng)
    name = f"{pick(rng, PEOPLE)} {strange_word(rng).capitalize()}"
    if roll < 0.3:
        requests = UNKNOWN_PHRASES["questions"]
    elif roll < 0.65:
        requests = [pick(rng, UNKNOWN_PHRASES["templates"]).format(pick(rng, UNKNOWN_PHRASES["things"]))]
    elif roll < 0.82:
        requests = [
            pick(rng, UNKNOWN_PHRASES["templates"]).format(f"{pick(rng, ['', '', 'a ', 'the '])}{word}")
        ]
    elif roll < 0.9:
        requests, _ = request("unknown weather", city=some_city(rng))
    else:
        requests, _ = request("unknown name", name=name, word=word.capitalize(), lower=word)
    return vary_question(rng, requests), pick(rng, UNKNOWN_REPLIES)


def statement(rng: random.Random) -> Pair:
    """Return a statement of the user instead of a question, and a polite answer."""
    noun, name = pick(rng, NOUNS + FRUITS), pick(rng, [*PET_NAMES, some_name(rng)])
    pet = pick(rng, CREATURES)
    fields = {
        "noun": noun,
        "a_noun": with_article(noun),
        "nouns": plural(noun),
        "name": name,
        "pet": pet,
        "a_pet": with_article(pet),
    }
    color, job, city, age = (
        pick(rng, COLORS),
        with_article(pick(rng, JOBS)),
        pick(rng, CITIES),
        rng.randrange(8, 80),
    )
    statements, replies = request("statement", **fields, color=color, a_job=job, city=city, age=age)
    return vary_typing(rng, pick(rng, statements)), pick(rng, replies)


MAKERS: dict[Callable[[random.Random], Pair], float] = {
    greeting: 8,
    small_talk: 14,
    capital: 8,
    animal: 8,
    legs: 2,
    thing_color: 4,
    opposite: 5,
    calendar: 5,
    small_sum: 8,
    thing_purpose: 4,
    definition: 8,
    compare: 3,
    number_fact: 3,
    why_and_how: 4,
    listing: 4,
    season: 2,
    poem: 3,
    sentence: 3,
    repeat: 3,
    unknown: 10,
    statement: 3,
}


def make_pair(rng: random.Random) -> Pair:
    """Return a question and its answer from a random function of `MAKERS`, chosen by its weight."""
    return rng.choices(list(MAKERS), list(MAKERS.values()))[0](rng)
