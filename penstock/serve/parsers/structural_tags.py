"""Pieces of xgrammar's structural tags, as plain JSON objects.

A structural tag says what a text must look like as a tree of formats: constant strings, free text, JSON by a
schema, and sequences, alternatives and repetitions of these.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.pipelines.core import Grammar
from penstock.serve.parsers.tools import Schema

Tag = dict[str, Any]


def constant(text: str) -> Tag:
    return {"type": "const_string", "value": text}


def by_schema(schema: Schema | bool, style: str = "json") -> Tag:
    return {"type": "json_schema", "json_schema": schema, "style": style}


def sequence(*parts: Tag) -> Tag:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def either(parts: Sequence[Tag]) -> Tag:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def optional(part: Tag) -> Tag:
    return {"type": "optional", "content": part}


def spaces(count: int = 3) -> Tag:
    """A few line ends or spaces, as models set between parts. No more, or a model might never go on."""
    return {"type": "regex", "pattern": f"[ \\n]{{0,{count}}}"}


def text_until(end: str) -> Tag:
    """Any text up to an end marker, and the marker."""
    return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}


def repeated(part: Tag, separator: str, parallel: bool) -> Tag:
    """One of `part`, or with `parallel` also several."""
    if not parallel:
        return part
    return {
        "type": "tags_with_separator",
        "tags": [{"type": "tag", "begin": "", "content": part, "end": ""}],
        "separator": separator,
        "at_least_one": True,
    }


def grammar_of(tag: Tag) -> Grammar:
    text = json.dumps({"type": "structural_tag", "format": tag}, ensure_ascii=False)
    return Grammar("structural_tag", text)


def tag_of(grammar: Grammar) -> Tag:
    """The same grammar as a part of a structural tag."""
    match grammar.kind:
        case "json_schema":
            return by_schema(json.loads(grammar.text))
        case "json_object":
            return by_schema({"type": "object"})
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "choice":
            return either([constant(choice) for choice in json.loads(grammar.text)])
        case "structural_tag":
            tag: Tag = json.loads(grammar.text)["format"]
            return tag
