"""Calls of Gemma 4: values without JSON quotes, and grammars of nested arguments."""

from __future__ import annotations

from typing import Any

import pytest
from support.call_formats import TOOLS, Call, collect_calls, parse, render_gemma4

from penstock.errors import UnsupportedSchemaError
from penstock.grammar.schema import grammar_source
from penstock.serve.parsers import Content, ParserFactory

PARSERS = ParserFactory.choose(None, "gemma4")
QUOTE = '<|"|>'
TREE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/place"},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "unit": {"enum": ["C", "F", None]},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "mixed": {"type": ["string", "boolean"]},
        "empty": {"type": "array", "maxItems": 0},
        "any": {},
    },
    "required": ["place"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        }
    },
}


def make_tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def accepts(schema: dict[str, Any], arguments: str) -> bool:
    """Return whether the grammar of a schema accepts a call with these arguments."""
    xgrammar = pytest.importorskip("xgrammar")
    grammar = PARSERS.grammar([make_tool(schema)], "required")
    assert grammar is not None
    vocabulary = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    compiled_grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(grammar_source(grammar).text)
    matcher = xgrammar.GrammarMatcher(compiled_grammar)
    text = f"<|tool_call>call:f{{{arguments}}}<tool_call|>".replace("'", QUOTE)
    return bool(matcher.accept_string(text) and matcher.accept_token(256))


def parse_arguments(arguments: str) -> dict[str, Any]:
    """Return the arguments of the only call in an output."""
    text = f"<|tool_call>call:search{{{arguments}}}<tool_call|>".replace("'", QUOTE)
    [call] = collect_calls(parse(PARSERS.new(tools=TOOLS), text, [1]))
    return call.arguments


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ("text:'a \"b\" {c}, d:e\n'", {"text": 'a "b" {c}, d:e\n'}),
        ("count:-1.5e3,exact:true,user:null", {"count": -1500, "exact": True, "user": None}),
        ("exact:False,user:None", {"exact": False, "user": None}),
        ("tags:['a',{b:[]},[1,2]],filter:{}", {"tags": ["a", {"b": []}, [1, 2]], "filter": {}}),
        (" 'text' : '' ,\n filter : { 'a b' : 1 } ", {"text": "", "filter": {"a b": 1}}),
        ('text:"J\\n",count:1,', {"text": "J\n", "count": 1}),
    ],
)
def test_arguments_are_converted_to_json(arguments: str, expected: dict[str, Any]) -> None:
    assert parse_arguments(arguments) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call>search{}<tool_call|>",
        "<|tool_call>call:search(text)<tool_call|>",
        '<|tool_call>call:other{a:1,b:{c:<|"|>}<|"|>}}<tool_call|>',
    ],
)
def test_other_text_is_content(text: str) -> None:
    events = parse(PARSERS.new(tools=TOOLS), text)
    assert events == [Content(text)]


@pytest.mark.parametrize("arguments", ["count:three", "tags:[" * 70, "count:" + "1" * 5000])
def test_a_call_ends_at_an_invalid_value(arguments: str) -> None:
    events = parse(PARSERS.new(tools=TOOLS), f"<|tool_call>call:search{{{arguments}}}<tool_call|>")
    assert len([event for event in events if type(event).__name__ == "ToolCallStart"]) == 1
    assert any(isinstance(event, Content) for event in events)


def test_several_calls_follow_each_other() -> None:
    calls = [Call("search", {"text": "a"}), Call("now")]
    assert collect_calls(parse(PARSERS.new(tools=TOOLS), render_gemma4(calls), [2])) == calls


@pytest.mark.parametrize(
    "arguments",
    [
        "place:{city:'Rome'}",
        "place:{city:'R',tags:['a','b <c>']},days:[1,2,3],unit:'F',note:'four',mixed:true",
        "place:{city:'',tags:[]},unit:null,note:null,mixed:'no',empty:[],any:-1",
        "place:{city:'x'},any:'text'",
    ],
)
def test_the_grammar_accepts_arguments_that_match_the_schema(arguments: str) -> None:
    assert accepts(TREE_SCHEMA, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "place:{}",
        "place:{city:1}",
        "place:{city:'x',days:[1]}",
        "place:{city:'x'},days:[]",
        "place:{city:'x'},days:[1,2,3,4]",
        "place:{city:'x'},days:['1']",
        "place:{city:'x'},unit:'K'",
        "place:{city:'x'},note:'longer'",
        "place:{city:'x'},mixed:1",
        "place:{city:'x'},empty:[1]",
        'place:{city:"x"}',
    ],
)
def test_the_grammar_rejects_arguments_that_do_not_match_the_schema(arguments: str) -> None:
    assert not accepts(TREE_SCHEMA, arguments)


def test_a_schema_without_properties_allows_any_arguments_if_it_says_so() -> None:
    schema = {"type": "object", "additionalProperties": True}
    for arguments in ("", "a:1", "a:'x',b:null"):
        assert accepts(schema, arguments)
    assert not accepts(schema, "a:")
    assert not accepts({}, "a:1")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^a$"}}}, "pattern"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"properties": {"a": {"type": "array", "minItems": 3, "maxItems": 2}}}, "maxItems"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}]}}}, "oneOf"),
        ({"properties": {"a": {"type": "object", "minProperties": 1}}}, "minProperties"),
        ({"properties": {"a": {"enum": ['<|"|>']}}}, "enum"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}, r"\$ref"),
        ({"properties": {"a": {"$ref": "#/$defs/c"}}}, r"\$ref"),
        ({"properties": {"a": False}}, "properties"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(UnsupportedSchemaError, match=keyword):
        PARSERS.grammar([make_tool(schema)], "required")
