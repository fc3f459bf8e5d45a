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
_MAX_REPETITIONS = 63


def constant(text: str) -> Tag:
    """Return the tag of a constant string."""
    return {"type": "const_string", "value": text}


def by_schema(schema: Schema | bool, escaped: str = "") -> Tag:
    """Return the tag of JSON that matches a schema.

    The JSON text contains the characters in `escaped` only as escapes inside strings.
    """
    return {"type": "json_schema", "json_schema": schema, **({"escaped": escaped} if escaped else {})}


def sequence(*parts: Tag) -> Tag:
    """Return the tag of a concatenation. Omits empty constants."""
    nonempty = [part for part in parts if part != constant("")]
    if not nonempty:
        return constant("")
    return nonempty[0] if len(nonempty) == 1 else {"type": "sequence", "elements": nonempty}


def either(parts: Sequence[Tag]) -> Tag:
    """Return the tag of text that matches one of the parts."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def optional(part: Tag) -> Tag:
    """Return the tag of text that matches ``part`` or is empty."""
    return {"type": "optional", "content": part}


def spaces(max_chars: int = 3) -> Tag:
    """Return the tag of at most `max_chars` line ends or spaces.

    Without a limit, a model could generate white space until the maximum length.
    """
    return pattern(f"[ \\n]{{0,{max_chars}}}")


def pattern(expression: str) -> Tag:
    """Return the tag of text that matches a regular expression completely."""
    return {"type": "regex", "pattern": expression}


def any_number(part: Tag) -> Tag:
    """Return the tag of 0 to 63 repetitions of `part`.

    The number is limited, because a tag inside free text must have a bounded number of repetitions.
    """
    return {"type": "repeat", "min": 0, "max": _MAX_REPETITIONS, "content": part}


def text_until(end: str, excluded: Sequence[str] = ()) -> Tag:
    """Return the tag of text up to and including an end marker, without any of the `excluded` strings."""
    content: Tag = {"type": "any_text", **({"excludes": list(excluded)} if excluded else {})}
    return {"type": "tag", "begin": "", "content": content, "end": end}


def rest_of_text() -> Tag:
    """Return the tag of any text up to the end of the output."""
    return {"type": "any_text"}


def triggered_tags(tags_after_markers: Mapping[str, Tag], parallel: bool) -> Tag:
    """Return the tag of free text in which each marker must be followed by text of the marker's tag.

    Without `parallel`, the output ends after the first marker and its tag. No marker may be a prefix of
    another marker.

    Args:
        tags_after_markers: marker -> tag of the text after the marker.
        parallel: allow several markers.
    """
    tags = [
        {"type": "tag", "begin": marker, "content": content, "end": ""}
        for marker, content in tags_after_markers.items()
    ]
    return {
        "type": "triggered_tags",
        "triggers": list(tags_after_markers),
        "tags": tags,
        "stop_after_first": not parallel,
    }


def repeated(part: Tag, separator: str, parallel: bool) -> Tag:
    """Return the tag of one `part`, or with `parallel` of 1 to 64 parts with `separator` between them."""
    return sequence(part, any_number(sequence(constant(separator), part))) if parallel else part


def grammar_of(tag: Tag) -> Grammar:
    """Return the grammar of a structural tag."""
    text = json.dumps({"type": "structural_tag", "format": tag}, ensure_ascii=False)
    return Grammar("structural_tag", text)


def tag_of(grammar: Grammar) -> Tag:
    """Return the structural tag of a grammar of any kind."""
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
    """Replace the special tokens in constants by token tags, which match only the token, not its text.

    Raises:
        UnsupportedFeatureError: the markers that begin calls in free text are neither all single special
            tokens nor all without special tokens.
    """
    tokens = sorted(special_tokens, key=len, reverse=True)
    if not tokens:
        return tag
    return _with_tokens(tag, re.compile(f"({'|'.join(map(re.escape, tokens))})"))


def _with_tokens(part: Tag, special_pattern: re.Pattern[str]) -> Tag:
    match part["type"]:
        case "const_string":
            return _constant_with_tokens(part["value"], special_pattern)
        case "json_schema" | "regex" | "any_text":
            return part
        case "tag":
            begin = _constant_with_tokens(part["begin"], special_pattern)
            end = _constant_with_tokens(part["end"], special_pattern)
            content = _with_tokens(part["content"], special_pattern)
            if end["type"] == "const_string":
                tag = {"type": "tag", "begin": "", "content": content, "end": part["end"]}
            else:
                assert end["type"] == "token", "the end marker of free text is one token"
                tag = {"type": "tag", "begin": "", "content": content, "end": end}
            return tag if not part["begin"] else sequence(begin, tag)
        case "triggered_tags":
            return _with_trigger_tokens(part, special_pattern)
    return {name: _value_with_tokens(value, special_pattern) for name, value in part.items()}


def _value_with_tokens(value: object, special_pattern: re.Pattern[str]) -> object:
    if isinstance(value, list):
        return [_value_with_tokens(element, special_pattern) for element in value]
    return _with_tokens(value, special_pattern) if isinstance(value, dict) else value


def _constant_with_tokens(text: str, special_pattern: re.Pattern[str]) -> Tag:
    parts = [part for part in special_pattern.split(text) if part]
    return sequence(
        *(
            {"type": "token", "token": part} if special_pattern.fullmatch(part) else constant(part)
            for part in parts
        )
    )


def _with_trigger_tokens(part: Tag, special_pattern: re.Pattern[str]) -> Tag:
    begins = [_constant_with_tokens(trigger, special_pattern) for trigger in part["triggers"]]
    contents = [_with_tokens(tag["content"], special_pattern) for tag in part["tags"]]
    types = {begin["type"] for begin in begins}
    if types == {"const_string"}:
        tags = [{**tag, "content": content} for tag, content in zip(part["tags"], contents, strict=True)]
        return {**part, "tags": tags}
    if types != {"token"}:
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
