"""Reads structural tags as grammar rules.

`penstock.grammar.schema` has already replaced the JSON schemas and regular expressions by EBNF, and the
texts of tokens by token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from penstock.errors import InputError, UnsupportedFeatureError
from penstock.grammar.lark.ebnf_reader import read_ebnf
from penstock.grammar.lark.nodes import (
    EMPTY,
    Alt,
    FreeText,
    Node,
    Ranges,
    Ref,
    Repeat,
    Rules,
    Seq,
    Text,
    TextUntil,
    Tokens,
    choice,
    repeated,
    sequence,
)

TagFormat: TypeAlias = Mapping[str, Any]
"""A format of a structural tag: a JSON object with a ``type``."""
FieldT = TypeVar("FieldT")


def read_structural_tag(text: str) -> Rules:
    """Return the rules of a structural tag, including ``root``.

    Raises:
        InputError: the JSON value is not a valid structural tag.
        UnsupportedFeatureError: a format has an unsupported field, or a grammar has an unsupported construct.
    """
    tag = json.loads(text)
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or "format" not in tag:
        raise InputError('a structural_tag must be an object with "type": "structural_tag" and a "format"')
    reader = _Reader()
    reader.rules["root"] = reader.node(tag["format"])
    return reader.rules


class _Reader:
    def __init__(self) -> None:
        self.rules: Rules = {}
        self._num_grammars = 0

    def node(self, tag_format: Any) -> Node:
        """Return the node of a format."""
        match _format_type(tag_format):
            case "const_string":
                return _text_node(_field(tag_format, "value", str))
            case "grammar":
                return self._grammar(_field(tag_format, "grammar", str))
            case "any_text":
                _refuse_fields(tag_format, "max_tokens", "max_chars")
                return FreeText(_string_list(tag_format, "excludes"))
            case "sequence":
                return sequence(map(self.node, _elements(tag_format)))
            case "or":
                return choice(map(self.node, _elements(tag_format)))
            case "optional":
                return choice([EMPTY, self.node(_field(tag_format, "content", dict))])
            case "star":
                return repeated(self.node(_field(tag_format, "content", dict)), 0, None)
            case "plus":
                return repeated(self.node(_field(tag_format, "content", dict)), 1, None)
            case "repeat":
                return self._repeat(tag_format)
            case "tag":
                return self._tag(tag_format)
            case "tags_with_separator":
                return self._tags_with_separator(tag_format)
            case "triggered_tags" | "dispatch":
                return self._triggered_tags(tag_format, ())
            case "token":
                return Tokens(_token_id_ranges([tag_format.get("token")]))
            case "exclude_token":
                return Tokens(_token_id_ranges(tag_format.get("exclude_tokens", [])), is_negated=True)
            case "any_tokens":
                _refuse_fields(tag_format, "max_tokens")
                return repeated(
                    Tokens(_token_id_ranges(tag_format.get("exclude_tokens", [])), is_negated=True), 0, None
                )
            case "token_triggered_tags" | "token_dispatch":
                return self._token_triggered_tags(tag_format, [])
            case kind:
                raise InputError(f"a structural_tag has no format {kind!r}")

    def _grammar(self, ebnf: str) -> Node:
        prefix = f"g{self._num_grammars}-"
        self._num_grammars += 1
        for name, node in read_ebnf(ebnf).items():
            self.rules[prefix + name] = _with_prefix(node, prefix)
        return Ref(f"{prefix}root")

    def _repeat(self, tag_format: TagFormat) -> Node:
        min_count, max_count = _field(tag_format, "min", int), _field(tag_format, "max", int)
        if min_count < 0 or (max_count != -1 and max_count < min_count):
            raise InputError(
                f"a repeat of a structural_tag has impossible bounds: {min_count} and {max_count}"
            )
        return repeated(
            self.node(_field(tag_format, "content", dict)), min_count, None if max_count == -1 else max_count
        )

    def _tag(self, tag_format: TagFormat) -> Node:
        begin, end = tag_format.get("begin"), tag_format.get("end")
        begin_node = _text_node(begin) if isinstance(begin, str) else self.node(begin)
        if isinstance(end, dict):
            token = self.node(end)
            return sequence(
                [begin_node, self._content_before_token(_field(tag_format, "content", dict), token), token]
            )
        end_texts = (end,) if isinstance(end, str) else tuple(end) if isinstance(end, list) else ()
        if not end_texts or not all(isinstance(end, str) for end in end_texts):
            raise InputError("a tag of a structural_tag needs an end: a string, strings or a token")
        return sequence([begin_node, self._with_end(_field(tag_format, "content", dict), end_texts)])

    def _content_before_token(self, content: TagFormat, token: Node) -> Node:
        if _format_type(content) in ("token_triggered_tags", "token_dispatch") and isinstance(token, Tokens):
            return self._token_triggered_tags(content, list(token.ranges))
        return self.node(content)

    def _with_end(self, tag_format: TagFormat, end_texts: tuple[str, ...]) -> Node:
        """Return the node of a format that is followed by one of ``end_texts``.

        Free text ends at the first end text. A single empty end text means that there is no end marker.
        """
        if end_texts == ("",):
            return self.node(tag_format)
        end_marker = choice(map(_text_node, end_texts))
        match _format_type(tag_format):
            case "any_text":
                _refuse_fields(tag_format, "max_tokens", "max_chars")
                return _text_until(end_texts, (), end_texts, _string_list(tag_format, "excludes"))
            case "triggered_tags" | "dispatch":
                return self._triggered_tags(tag_format, end_texts)
            case "sequence":
                *parts, last = _elements(tag_format)
                return sequence([*map(self.node, parts), self._with_end(last, end_texts)])
            case "or":
                return choice(self._with_end(option, end_texts) for option in _elements(tag_format))
            case "optional":
                return choice([end_marker, self._with_end(_field(tag_format, "content", dict), end_texts)])
        return sequence([self.node(tag_format), end_marker])

    def _tags_with_separator(self, tag_format: TagFormat) -> Node:
        tag = choice(map(self.node, _non_empty_list(tag_format, "tags")))
        further_tags: Node = EMPTY
        if not tag_format.get("stop_after_first"):
            further_tags = repeated(
                sequence([_text_node(_field(tag_format, "separator", str)), tag]), 0, None
            )
        tags = sequence([tag, further_tags])
        return tags if tag_format.get("at_least_one") else choice([EMPTY, tags])

    def _triggered_tags(self, tag_format: TagFormat, end_texts: tuple[str, ...]) -> Node:
        """Return the node of free text in which a trigger text starts a format.

        The text ends at the first end text. If ``end_texts`` is empty, the text has no end marker.
        """
        contents = self._contents_by_trigger(tag_format)
        excludes, triggers = _string_list(tag_format, "excludes"), tuple(contents)
        stops_after_first = tag_format.get("stop_after_first") or (
            tag_format["type"] == "dispatch" and not tag_format.get("loop", True)
        )
        words = (*triggers, *end_texts)
        text_and_tag = choice(
            sequence([_text_until((trigger,), triggers, end_texts, excludes), content])
            for trigger, content in contents.items()
        )
        end_marker = choice(map(_text_node, end_texts)) if end_texts else EMPTY
        free_text: Node = (
            FreeText((*words, *excludes))
            if not end_texts
            else _text_until(end_texts, triggers, end_texts, excludes)
        )
        result = (
            choice([free_text, sequence([text_and_tag, end_marker])])
            if stops_after_first
            else sequence([repeated(text_and_tag, 0, None), free_text])
        )
        if not tag_format.get("at_least_one"):
            return result
        first_tag = choice(map(self.node, _non_empty_list(tag_format, "tags")))
        return sequence([first_tag, end_marker if stops_after_first else result])

    def _contents_by_trigger(self, tag_format: TagFormat) -> dict[str, Node]:
        """Return trigger text -> node of the formats that can follow it."""
        nodes: dict[str, list[Node]] = {}
        if tag_format["type"] == "dispatch":
            for rule in _non_empty_list(tag_format, "rules"):
                trigger, content = rule if isinstance(rule, list) and len(rule) == 2 else (None, None)
                if not isinstance(trigger, str) or not trigger:
                    raise InputError(
                        "a rule of a dispatch must be a pair: a text that is not empty, and a format"
                    )
                nodes.setdefault(trigger, []).append(self.node(content))
        else:
            triggers = _string_list(tag_format, "triggers")
            for tag in _non_empty_list(tag_format, "tags"):
                begin = tag.get("begin") if isinstance(tag, dict) else None
                matching_triggers = [
                    trigger for trigger in triggers if isinstance(begin, str) and begin.startswith(trigger)
                ]
                if len(matching_triggers) != 1 or not isinstance(begin, str):
                    raise InputError(
                        "each tag of triggered_tags must begin with exactly one trigger, "
                        f"but {begin!r} begins with {len(matching_triggers)} triggers"
                    )
                tag_after_trigger = {**tag, "begin": begin[len(matching_triggers[0]) :]}
                nodes.setdefault(matching_triggers[0], []).append(self.node(tag_after_trigger))
        if not nodes:
            raise InputError(f"the {tag_format['type']} of a structural_tag has no tags")
        return {trigger: choice(options) for trigger, options in nodes.items()}

    def _token_triggered_tags(self, tag_format: TagFormat, end_id_ranges: list[tuple[int, int]]) -> Node:
        """Return the node of free tokens in which a trigger token starts a format.

        This is `_triggered_tags` with token ids instead of trigger texts and end texts. The free tokens
        exclude ``end_id_ranges``; the caller adds the end token.
        """
        if tag_format["type"] == "token_dispatch":
            rules = _non_empty_list(tag_format, "rules")
            if not all(isinstance(rule, list) and len(rule) == 2 for rule in rules):
                raise InputError("a rule of a token_dispatch must be a pair: a token and a format")
            triggers = [rule[0] for rule in rules]
            tags = [
                sequence([Tokens(_token_id_ranges([token])), self.node(content)]) for token, content in rules
            ]
            stops_after_first = not tag_format.get("loop", True)
        else:
            triggers = _non_empty_list(tag_format, "trigger_tokens")
            tags = [self.node(tag) for tag in _non_empty_list(tag_format, "tags")]
            stops_after_first = bool(tag_format.get("stop_after_first"))
        excluded_ids = _token_id_ranges([*triggers, *tag_format.get("exclude_tokens", [])])
        text = repeated(Tokens(tuple(sorted({*excluded_ids, *end_id_ranges})), is_negated=True), 0, None)
        text_and_tag = sequence([text, choice(tags)])
        result = (
            choice([text, text_and_tag])
            if stops_after_first
            else sequence([repeated(text_and_tag, 0, None), text])
        )
        if not tag_format.get("at_least_one"):
            return result
        return sequence([choice(tags), EMPTY if stops_after_first else result])


def _text_until(
    allowed_ends: tuple[str, ...],
    triggers: tuple[str, ...],
    end_texts: tuple[str, ...],
    excludes: tuple[str, ...],
) -> Node:
    """Return the node of free text up to the first trigger or end text, which must be in ``allowed_ends``."""
    if "" in end_texts:
        raise InputError("free text in a tag of a structural_tag needs an end that is not empty")
    words = {*triggers, *end_texts}
    forbidden_words = tuple(word for word in excludes if word not in words)
    return choice(TextUntil(word, tuple(sorted(words - {word})), forbidden_words) for word in allowed_ends)


def _format_type(tag_format: object) -> str:
    if not isinstance(tag_format, dict) or not isinstance(tag_format.get("type"), str):
        raise InputError(
            f"a format of a structural_tag must be an object with a type, was {str(tag_format)[:80]}"
        )
    kind: str = tag_format["type"]
    return kind


def _field(tag_format: TagFormat, name: str, value_type: type[FieldT]) -> FieldT:
    value = tag_format.get(name)
    if not isinstance(value, value_type) or isinstance(value, bool):
        raise InputError(
            f"the {tag_format['type']} of a structural_tag needs {name}, a {value_type.__name__}"
        )
    return value


def _non_empty_list(tag_format: TagFormat, name: str) -> list[Any]:
    value = tag_format.get(name)
    if not isinstance(value, list) or not value:
        raise InputError(
            f"the {tag_format['type']} of a structural_tag needs {name}, a list that is not empty"
        )
    return value


def _elements(tag_format: TagFormat) -> list[Any]:
    return _non_empty_list(tag_format, "elements")


def _string_list(tag_format: TagFormat, name: str) -> tuple[str, ...]:
    words = tag_format.get(name) or []
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise InputError(f"{name} of a structural_tag must be strings that are not empty")
    return tuple(words)


def _text_node(text: str) -> Node:
    return Text(text) if text else EMPTY


def _token_id_ranges(tokens: Sequence[object]) -> Ranges:
    ids = [token for token in tokens if isinstance(token, int) and token >= 0]
    if len(ids) < len(tokens):
        raise InputError("the tokens of a structural_tag must be ids or texts of tokens of this model")
    return tuple((token, token) for token in sorted(set(ids)))


def _refuse_fields(tag_format: TagFormat, *names: str) -> None:
    for name in names:
        if tag_format.get(name) is not None:
            raise UnsupportedFeatureError(f"a structural tag with {name}", "omit it")


def _with_prefix(node: Node, prefix: str) -> Node:
    if isinstance(node, Ref):
        return Ref(prefix + node.name)
    if isinstance(node, Seq):
        return Seq(tuple(_with_prefix(part, prefix) for part in node.parts))
    if isinstance(node, Alt):
        return Alt(tuple(_with_prefix(option, prefix) for option in node.options))
    if isinstance(node, Repeat):
        return Repeat(_with_prefix(node.part, prefix), node.min_count, node.max_count)
    return node
