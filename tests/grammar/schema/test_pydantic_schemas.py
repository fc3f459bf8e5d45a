"""JSON schemas of pydantic types: generated texts are valid, and pydantic parses those of most types."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import uuid
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from support.byte_grammar import compile_grammar, generate_random_text

from penstock.grammar.schema import schema_ebnf

pydantic = pytest.importorskip("pydantic")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Tree(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    value: int
    branches: list[Tree] = []  # noqa: RUF012 (pydantic copies it)


TYPES: dict[str, Any] = {
    "set of literals": set[Literal["a", "b", "c"]],
    "set of enum": frozenset[Colour],
    "set of int enum": set[Number],
    "set of bool": set[bool],
    "bounded set": Annotated[
        set[Annotated[int, pydantic.Field(ge=0, le=5)]], pydantic.Field(min_length=1, max_length=3)
    ],
    "literal": Literal["a", 1, None],
    "url": pydantic.AnyUrl,
    "http url": pydantic.HttpUrl,
    "optional url": pydantic.HttpUrl | None,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "date": datetime.date,
    "time": datetime.time,
    "date and time": datetime.datetime,
    "timedelta": datetime.timedelta,
    "decimal": decimal.Decimal,
    "bounded decimal": pydantic.condecimal(max_digits=10, decimal_places=2),
    "uuid": uuid.UUID,
    "mapping": dict[Colour, int],
    "tuple": tuple[int, str],
    "pattern": pydantic.constr(pattern=r"^[A-Z]{2}\d+(-\d+)*$", min_length=3, max_length=20),
    "tree": Tree,
}

# Types for which pydantic rejects or rewrites some values of the format (leap seconds, lengths, hosts).
_NOT_PARSED = {"url", "http url", "optional url", "date and time", "time", "timedelta"}
_NOT_PARSED |= {"decimal", "bounded decimal"}


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("name", TYPES)
def test_generated_texts_are_valid_and_pydantic_parses_those_of_most_types(name: str, mode: Any) -> None:
    adapter = pydantic.TypeAdapter(TYPES[name])
    schema = adapter.json_schema(mode=mode)
    grammar = compile_grammar(schema_ebnf(schema))
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for seed in range(8):
        text = generate_random_text(grammar, seed, 5 * seed)
        validator.validate(json.loads(text))
        if name not in _NOT_PARSED:
            adapter.validate_json(text)
