"""Reads the phrase files in ``texts/`` and fills their templates.

A file has ``[sections]`` of lines. A line that begins with a space continues the previous line. A line that
begins with ``#`` is a comment. Within a line, ``|`` separates alternatives, and ``=>`` separates a question
from its answer or a key from its values.
"""

import functools
from pathlib import Path
from typing import Any

from .words import upper_first

FOLDER = Path(__file__).parent / "texts"

Exchange = tuple[list[str], list[str]]


def split_alternatives(text: str) -> list[str]:
    """Return the alternatives of a line."""
    return [part.strip() for part in text.split(" | ")]


@functools.cache
def read_sections(name: str) -> dict[str, list[str]]:
    """Return the logical lines of each section of ``texts/<name>.txt``."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (FOLDER / f"{name}.txt").read_text().splitlines():
        if line.startswith("["):
            lines = sections.setdefault(line.strip("[]"), [])
        elif line.startswith(" "):
            lines[-1] += f" {line.strip()}"
        elif line and not line.startswith("#"):
            lines.append(line)
    return sections


def parse_exchange(line: str) -> Exchange:
    """Return the alternatives before and after ``=>`` of a line. Without ``=>`` the second list is empty."""
    requests, _, replies = line.partition(" => ")
    return split_alternatives(requests), split_alternatives(replies)


def read_table(name: str, section: str) -> dict[str, str]:
    """Return a section of ``key => value`` lines as a mapping."""
    return {key: value for key, _, value in (line.partition(" => ") for line in read_sections(name)[section])}


def request(section: str, line: int = 0, **fields: Any) -> Exchange:
    """Return the requests and replies of a line of ``requests.txt``, with fields replaced by values.

    A field with a capitalized name is replaced by the capitalized value.
    """
    fields |= {upper_first(name): upper_first(str(value)) for name, value in fields.items()}
    requests, replies = parse_exchange(read_sections("requests")[section][line])
    return [text.format(**fields) for text in requests], [text.format(**fields) for text in replies]
