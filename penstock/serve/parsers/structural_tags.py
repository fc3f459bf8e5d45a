"""Structural tags of xgrammar, as plain JSON objects.

A structural tag describes a text as a tree of formats: constant strings, free text, JSON of a schema, and
sequences, alternatives and repetitions of formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import UnsupportedFeatureError
from penstock.pipelines.core import Grammar
from penstock.serve.parsers.tools import Schema

Tag = dict[str, Any]
_MANY = 63


def constant(text: str) -> Tag:
    return {"type": "const_string", "value": text}


def by_schema(schema: Schema | bool, escaped: str = "") -> Tag:
    """Return JSON of a schema. Characters in `escaped` appear in its strings only as escapes."""
    return {"type": "json_schema", "json_schema": schema, **({"escaped": escaped} if escaped else {})}


def sequence(*parts: Tag) -> Tag:
    """Return the concatenation of formats, without empty constants."""
    some = [part for part in parts if part != constant("")]
    if not some:
        return constant("")
    return some[0] if len(some) == 1 else {"type": "sequence", "elements": some}


def either(parts: Sequence[Tag]) -> Tag:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def optional(part: Tag) -> Tag:
    return {"type": "optional", "content": part}


def spaces(count: int = 3) -> Tag:
    """Return up to `count` line ends or spaces. The bound keeps a model from writing white space forever."""
    return pattern(f"[ \\n]{{0,{count}}}")


def pattern(expression: str) -> Tag:
    """Return a regular expression that must match completely."""
    return {"type": "regex", "pattern": expression}


def any_number(part: Tag) -> Tag:
    """Return zero or more of `part`, bounded because free text must not contain unbounded formats."""
    return {"type": "repeat", "min": 0, "max": _MANY, "content": part}


def text_until(end: str, without: Sequence[str] = ()) -> Tag:
    """Return any text up to an end marker, and the marker; the text contains none of `without`."""
    content: Tag = {"type": "any_text", **({"excludes": list(without)} if without else {})}
    return {"type": "tag", "begin": "", "content": content, "end": end}


def rest_of_text() -> Tag:
    """Return any text up to the end of the output."""
    return {"type": "any_text"}


def triggered(after: Mapping[str, Tag], parallel: bool) -> Tag:
    """Return free text in which each marker is followed by its format.

    Unless `parallel`, the text ends after the first format. No marker may be a prefix of another one.

    Args:
        after: the format of the text after each marker.
        parallel: allow several markers.
    """
    tags = [
        {"type": "tag", "begin": marker, "content": content, "end": ""} for marker, content in after.items()
    ]
    return {
        "type": "triggered_tags",
        "triggers": list(after),
        "tags": tags,
        "stop_after_first": not parallel,
    }


def repeated(part: Tag, separator: str, parallel: bool) -> Tag:
    """Return one `part`, or with `parallel` one or several with a separator between."""
    return sequence(part, any_number(sequence(constant(separator), part))) if parallel else part


def grammar_of(tag: Tag) -> Grammar:
    text = json.dumps({"type": "structural_tag", "format": tag}, ensure_ascii=False)
    return Grammar("structural_tag", text)


def tag_of(grammar: Grammar) -> Tag:
    """Return a grammar as a format of a structural tag."""
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


def with_tokens(tag: Tag, special_tokens: Iterable[str]) -> Tag:
    """Replace special tokens in constant strings by token formats, because no text produces them.

    Raises:
        UnsupportedFeatureError: only some of the markers that begin calls in free text are single special
            tokens.
    """
    found = sorted(special_tokens, key=len, reverse=True)
    if not found:
        return tag
    return _with_tokens(tag, re.compile(f"({'|'.join(map(re.escape, found))})"))


def _with_tokens(part: Tag, special: re.Pattern[str]) -> Tag:
    match part["type"]:
        case "const_string":
            return _spelled(part["value"], special)
        case "json_schema" | "regex" | "any_text":
            return part
        case "tag":
            begin, end = _spelled(part["begin"], special), _spelled(part["end"], special)
            content = _with_tokens(part["content"], special)
            if end["type"] == "const_string":
                tag = {"type": "tag", "begin": "", "content": content, "end": part["end"]}
            else:
                assert end["type"] == "token", "free text ends with one marker"
                tag = {"type": "tag", "begin": "", "content": content, "end": end}
            return tag if not part["begin"] else sequence(begin, tag)
        case "triggered_tags":
            return _with_trigger_tokens(part, special)
    return {name: _value_with_tokens(one, special) for name, one in part.items()}


def _value_with_tokens(value: object, special: re.Pattern[str]) -> object:
    if isinstance(value, list):
        return [_value_with_tokens(one, special) for one in value]
    return _with_tokens(value, special) if isinstance(value, dict) else value


def _spelled(text: str, special: re.Pattern[str]) -> Tag:
    pieces = [piece for piece in special.split(text) if piece]
    parts = [
        {"type": "token", "token": piece} if special.fullmatch(piece) else constant(piece) for piece in pieces
    ]
    return sequence(*parts) if parts else constant("")


def _with_trigger_tokens(part: Tag, special: re.Pattern[str]) -> Tag:
    begins = [_spelled(trigger, special) for trigger in part["triggers"]]
    contents = [_with_tokens(tag["content"], special) for tag in part["tags"]]
    kinds = {begin["type"] for begin in begins}
    if kinds == {"const_string"}:
        tags = [{**tag, "content": content} for tag, content in zip(part["tags"], contents, strict=True)]
        return {**part, "tags": tags}
    if kinds != {"token"}:
        raise UnsupportedFeatureError(
            "strict tools with tool_choice 'auto'",
            f"the markers of this model, {' and '.join(part['triggers'])}, are not all single tokens",
        )
    return {
        "type": "token_triggered_tags",
        "trigger_tokens": [begin["token"] for begin in begins],
        "tags": [
            {"type": "tag", "begin": begin, "content": content, "end": ""}
            for begin, content in zip(begins, contents, strict=True)
        ],
        "stop_after_first": part["stop_after_first"],
    }
