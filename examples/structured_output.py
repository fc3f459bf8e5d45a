"""Structured output that a class, a regular expression or a list of choices constrains.

penstock serve &
python examples/structured_output.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """The schema of the answer."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    city: str = Field(max_length=20)


class Verdict(BaseModel):
    """A schema with a free text field."""

    mood: Literal["happy", "sad"]
    because: str = Field(max_length=60)


def print_parsed(client: OpenAI, model: str, schema: type[BaseModel], text: str) -> None:
    """Print the answer as an object of a class. The client converts the class to a JSON schema."""
    reply = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": text}],
        response_format=schema,
        temperature=0,
        max_tokens=150,
    )
    print(repr(reply.choices[0].message.parsed))


def print_constrained(client: OpenAI, model: str, text: str, **constraint: Any) -> None:
    """Print an answer that is constrained by a field of ``structured_outputs``."""
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        extra_body={"structured_outputs": constraint},
    )
    print(constraint, "->", reply.choices[0].message.content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    with OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key) as client:
        model = client.models.list().data[0].id
        print_parsed(client, model, Person, "Tom is 31 years old and lives in Oslo. Answer as JSON.")
        print_parsed(client, model, Verdict, "How did the story of the lost dog end?")
        print_constrained(client, model, "When was that?", regex=r"[12][0-9]{3}-[01][0-9]-[0-3][0-9]")
        print_constrained(client, model, "Is the sky blue?", choice=["yes", "no", "perhaps"])
