"""Requests for JSON with valid and compact answers, which train JSON syntax and exact copying."""

import json
import random
from collections.abc import Callable
from typing import Any

from .asking import vary_command, vary_typing
from .texts import request
from .words import (
    BOOKS,
    CAPITALS,
    CITIES,
    COLORS,
    FRUITS,
    JOBS,
    NOUNS,
    PEOPLE,
    TOYS,
    join_list,
    pick,
    plural,
    some_city,
    some_name,
    split_list,
    with_article,
)

HOBBIES = split_list("reading, swimming, music, painting, cooking, chess, running")
TAGS = split_list("new, small, old, fresh, good")
FREE_KEYS = NOUNS + split_list("width, height, score, level, status, size, weight, rating, answer, reason")
FIELD_VALUE_MAKERS: dict[str, Callable[[random.Random], Any]] = {
    "name": lambda rng: pick(rng, PEOPLE),
    "age": lambda rng: rng.randrange(5, 90),
    "city": lambda rng: pick(rng, CITIES),
    "job": lambda rng: pick(rng, JOBS),
    "color": lambda rng: pick(rng, COLORS),
    "price": lambda rng: rng.randrange(1, 100),
    "title": lambda rng: pick(rng, BOOKS),
    "author": lambda rng: pick(rng, PEOPLE),
    "year": lambda rng: rng.randrange(1950, 2026),
    "country": lambda rng: pick(rng, list(CAPITALS)[:27]),
    "quantity": lambda rng: rng.randrange(1, 20),
    "married": lambda rng: rng.random() < 0.5,
    "in_stock": lambda rng: rng.random() < 0.5,
    "hobbies": lambda rng: rng.sample(HOBBIES, 2),
    "email": lambda rng: f"{pick(rng, PEOPLE).lower()}@example.com",
    "id": lambda rng: rng.randrange(1, 1000),
    "tags": lambda rng: rng.sample(TAGS, 2),
}
FIELDS_BY_THING = {
    "person": ["name", "age", "city", "job", "married", "hobbies", "email"],
    "user": ["id", "name", "email", "age", "city"],
    "book": ["title", "author", "year", "price", "in_stock"],
    "fruit": ["name", "color", "price", "quantity"],
    "product": ["id", "name", "price", "color", "quantity", "in_stock", "tags"],
    "car": ["color", "year", "price", "id"],
    "city": ["name", "country"],
    "cat": ["name", "age", "color"],
    "dog": ["name", "age", "color"],
}

Pair = tuple[str, str]


def field_value(rng: random.Random, thing: str, field: str) -> Any:
    """Return a value for a field of a thing."""
    if field == "name" and thing in {"fruit", "product", "city"}:
        return {"fruit": pick(rng, FRUITS), "product": pick(rng, TOYS), "city": pick(rng, CITIES)}[thing]
    return FIELD_VALUE_MAKERS[field](rng)


def make_thing(rng: random.Random, thing: str, fields: list[str]) -> dict[str, Any]:
    """Return consistent values for the fields: the country of the city, an email address with the name."""
    value = {field: field_value(rng, thing, field) for field in fields}
    if thing == "city":
        value["country"], value["name"] = rng.choice(list(CAPITALS.items()))
    if "name" in value and "email" in value:
        value["email"] = f"{value['name'].lower()}@example.com"
    return value


def some_fields(rng: random.Random, available: list[str]) -> list[str]:
    """Return two to four of the fields in random order. If there are only two, return both."""
    if len(available) == 2:
        return available
    return rng.sample(available, rng.randrange(2, min(4, len(available)) + 1))


def json_object(rng: random.Random) -> Pair:
    """Ask for a thing as JSON, with given fields or without naming the fields."""
    thing = pick(rng, list(FIELDS_BY_THING))
    fields = some_fields(rng, FIELDS_BY_THING[thing])
    value = make_thing(rng, thing, fields)
    field_phrases = [field.replace("_", " ") for field in fields]
    if rng.random() < 0.25:
        field_phrases = [with_article(field) for field in field_phrases]
    requests, _ = request(
        "json with fields", listed=join_list(field_phrases), item=with_article(thing), keys=", ".join(fields)
    )
    if rng.random() < 0.25:
        value = make_thing(rng, thing, FIELDS_BY_THING[thing][:3])
        requests, _ = request("json of a thing", item=with_article(thing))
        requests += request("any json")[0] if thing == "person" else []
    return vary_command(rng, requests), json.dumps(value)


def json_extraction(rng: random.Random) -> Pair:
    """Ask for the values in a sentence as a JSON object."""
    name, age, city, job = some_name(rng), rng.randrange(5, 90), some_city(rng), pick(rng, JOBS)
    color, fruit, count, price = (
        pick(rng, COLORS),
        pick(rng, FRUITS),
        rng.randrange(2, 20),
        rng.randrange(1, 100),
    )
    purchase = {"fruit": fruit, "quantity": count, "price": price}
    facts: list[tuple[str, dict[str, Any]]] = [
        (f"{name} is {age} years old.", {"name": name, "age": age}),
        (f"{name} is {age} years old and lives in {city}.", {"name": name, "age": age, "city": city}),
        (f"{name} lives in {city}.", {"name": name, "city": city}),
        (f"{name} is {with_article(job)} in {city}.", {"name": name, "job": job, "city": city}),
        (f"{name} is {with_article(job)}.", {"name": name, "job": job}),
        (f"I bought {count} {plural(fruit)} for {price} dollars.", purchase),
        (f"The car is {color} and costs {price} dollars.", {"color": color, "price": price}),
        (f"{name} likes the color {color}.", {"name": name, "color": color}),
    ]
    fact, value = rng.choice(facts)
    requests, _ = request("json of a fact", fact=fact, listed=join_list(list(value)))
    is_varied = rng.random() < 0.3
    text = pick(rng, requests)
    return vary_typing(rng, text) if is_varied else text, json.dumps(value)


def json_list(rng: random.Random) -> Pair:
    """Ask for a JSON array of words."""
    count = rng.randrange(2, 5)
    kinds = {"colors": COLORS, "fruits": FRUITS, "cities": CITIES, "names": PEOPLE, "jobs": JOBS}
    kind, names = rng.choice(list(kinds.items()))
    requests, _ = request("json list", count=count, kind=kind)
    return vary_command(rng, requests), json.dumps(rng.sample(names, count))


def json_answer(rng: random.Random) -> Pair:
    """Ask a question whose answer must be a JSON object."""
    country, city = rng.choice(list(CAPITALS.items()))
    first, second = rng.randrange(11), rng.randrange(11)
    capital_task = {"country": country, "capital": city}, f"hat is the capital of {country}?"
    sum_task = {"result": first + second}, f"hat is {first} + {second}?"
    choice = rng.randrange(4)
    value, text = capital_task if choice < 2 else sum_task
    question = f"W{text} Answer as JSON." if choice % 2 == 0 else f"Answer as JSON: w{text}"
    return question, json.dumps(value)


def json_free(rng: random.Random) -> Pair:
    """Ask for an object with random keys. The request names the kind of each value in brackets."""
    keys = rng.sample(FREE_KEYS, rng.randrange(1, 4))
    hints, value = [], {}
    for key in keys:
        kind = pick(rng, ["number", "string", "boolean"])
        hints.append(f"{key} ({kind})")
        value_candidates = {
            "number": rng.randrange(1, 100),
            "string": pick(rng, COLORS),
            "boolean": rng.random() < 0.5,
        }
        value[key] = value_candidates[kind]
    requests, _ = request("json with free keys", listed=join_list(hints), keys=", ".join(hints))
    return pick(rng, requests), json.dumps(value)


def json_pair(rng: random.Random) -> Pair:
    """Return one of the JSON tasks."""
    tasks = [json_object, json_extraction, json_free, json_list, json_answer]
    return rng.choices(tasks, [5, 5, 2, 1, 1])[0](rng)
