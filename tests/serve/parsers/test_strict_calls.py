"""Grammars that enforce the argument schemas of calls. Grammars and parsing of the harmony format."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from support.call_formats import FORMATS_WITHOUT_MARKER, RENDERERS, VALUE_ENDS, Call, collect_calls, parse

from penstock.errors import UnsupportedFeatureError, UnsupportedSchemaError
from penstock.grammar.schema import grammar_source
from penstock.pipelines.core import Grammar
from penstock.serve.parsers import Content, ParserFactory, Reasoning
from penstock.serve.parsers.formats import TOOL_FORMATS

xgrammar = pytest.importorskip("xgrammar")
llguidance_bytes = pytest.importorskip("support.llguidance_bytes")

FORMATS = pytest.mark.parametrize("name", list(TOOL_FORMATS))
END_TOKEN_ID = 256
SPECIAL_TOKENS = (
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|constrain|>",
    "<|call|>",
    "<|python_tag|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
)
RICH_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "day": {"$ref": "#/$defs/Day"},
        "short": {"type": "string", "minLength": 2, "maxLength": 4},
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "exact": {"type": "boolean"},
        "who": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "some": {"type": ["string", "integer"], "description": "either"},
        "mixed": {"enum": ["x", 1, None]},
        "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3},
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number"}},
            "required": ["lat"],
            "additionalProperties": False,
        },
        "anything": {},
    },
    "required": ["unit", "count", "who", "some", "extra"],
    "$defs": {"Day": {"type": "string", "enum": ["Mon", "Tue"]}},
}
STRICT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["text", "count"],
    "additionalProperties": False,
}


def make_tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    make_tool("search", STRICT_SCHEMA),
    make_tool("now", {"type": "object", "properties": {"zone": {"type": "integer"}}}),
]


@cache
def make_compiler() -> Any:
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    vocabulary += [b"\xff" + token.encode() for token in SPECIAL_TOKENS]
    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[END_TOKEN_ID]
    )
    return xgrammar.GrammarCompiler(info, cache_enabled=False)


@cache
def compile_grammar(grammar: Grammar) -> Any:
    source = grammar_source(grammar, token_id=lambda text: END_TOKEN_ID + 1 + SPECIAL_TOKENS.index(text))
    return make_compiler().compile_structural_tag(source.text)


def accepts(grammar: Grammar, text: str, special_tokens: tuple[str, ...] = ()) -> bool:
    """Return whether a grammar accepts a whole text. Check that xgrammar and llguidance agree.

    Each string of `special_tokens` in the text is one token. Each byte of the remaining text is one token.
    """
    matcher = xgrammar.GrammarMatcher(compile_grammar(grammar))
    ids: list[int] = []
    while text:
        token = next((string for string in special_tokens if text.startswith(string)), None)
        ids += [END_TOKEN_ID + 1 + SPECIAL_TOKENS.index(token)] if token else text[0].encode()
        text = text[len(token or "x") :]
    is_accepted = all(map(matcher.accept_token, [*ids, END_TOKEN_ID]))
    source = grammar_source(grammar, token_id=lambda text: END_TOKEN_ID + 1 + SPECIAL_TOKENS.index(text))
    llguidance_matcher = llguidance_bytes.match_source(source, tuple(SPECIAL_TOKENS))
    assert llguidance_bytes.accepts(llguidance_matcher, ids) == is_accepted, "the two libraries disagree"
    return is_accepted


def render_calls(name: str, *calls: Call) -> str:
    if name in ("pythonic", "lfm2", "olmo3"):
        rendered_calls = [
            f"{call.name}({', '.join(f'{key}={json.dumps(value)}' for key, value in call.arguments.items())})"
            for call in calls
        ]
        if name == "olmo3":
            lines = "\n".join(rendered_calls)
            return f"<function_calls>{lines}</function_calls>"
        text = f"[{', '.join(rendered_calls)}]"
        return text if name == "pythonic" else f"<|tool_call_start|>{text}<|tool_call_end|>"
    if name == "cohere":
        return RENDERERS[name](calls).replace("[\n    ", "[").replace("\n]", "]")
    return RENDERERS[name](calls)


def make_strict_grammar(name: str, reasoning: str = "none", **options: Any) -> Grammar:
    return ParserFactory.choose(None, name, reasoning).strict_grammar(TOOLS, {"search"}, **options)


@FORMATS
def test_calls_of_a_strict_tool_in_free_text_must_match_its_schema(name: str) -> None:
    reasoning = "harmony" if name == "harmony" else "none"
    grammar = make_strict_grammar(name, reasoning)
    final_marker = "<|channel|>final<|message|>" if name == "harmony" else ""
    text_before = "" if name in FORMATS_WITHOUT_MARKER else "Well.\n"
    if name == "harmony":
        text_before = "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant"
    valid_call = Call("search", {"text": "a b", "count": 3})
    assert accepts(grammar, f"{final_marker}Nothing to call here, 1 < 2.")
    assert accepts(grammar, text_before + render_calls(name, valid_call))
    assert accepts(grammar, text_before + render_calls(name, Call("now", {"any": 7, "zone": 1})))
    for invalid_arguments in (
        {"text": "a b", "count": "three"},
        {"text": "a"},
        {"text": "a", "count": 1, "more": 2},
    ):
        assert not accepts(grammar, text_before + render_calls(name, Call("search", invalid_arguments))), (
            invalid_arguments
        )
    assert not accepts(grammar, text_before + render_calls(name, Call("other", {"a": 1})))
    parser = ParserFactory.choose(None, name, reasoning).new(tools=TOOLS)
    assert collect_calls(
        [
            event
            for event in parse(parser, text_before + render_calls(name, valid_call))
            if not isinstance(event, Content | Reasoning)
        ]
    ) == [valid_call]


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "harmony"])
def test_without_parallel_calls_a_second_call_is_refused(name: str) -> None:
    call_text = render_calls(name, Call("search", {"text": "a", "count": 3}))
    assert accepts(make_strict_grammar(name, parallel=False), call_text)
    assert not accepts(make_strict_grammar(name, parallel=False), f"{call_text} {call_text}")


@FORMATS
@pytest.mark.parametrize("seed", range(4))
def test_random_output_of_a_forced_call_has_valid_arguments(name: str, seed: int) -> None:
    parsers = ParserFactory.choose(None, name)
    tools = [make_tool("rich", RICH_SCHEMA), make_tool("none", {})]
    grammar = parsers.grammar(tools, {"type": "function", "function": {"name": "rich"}})
    assert grammar is not None
    text = generate_random_text(compile_grammar(grammar), seed, VALUE_ENDS.get(name, ""))
    [call] = collect_calls(parse(parsers.new(tools=tools), text))
    assert call.name == "rich"
    jsonschema.validate(call.arguments, RICH_SCHEMA)


def generate_random_text(grammar: Any, seed: int, value_end: str) -> str:
    """Return a random text that the grammar accepts.

    Printable ASCII characters are preferred. Ends of values are more likely, so that values are short.
    """
    rng = random.Random(seed)
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = torch.empty((1, -(-(END_TOKEN_ID + 1 + len(SPECIAL_TOKENS)) // 32)), dtype=torch.int32)
    output = b""
    while True:
        if value_end and rng.random() < 0.1 and matcher.accept_string(value_end):
            output += value_end.encode()
            continue
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
        allowed_ids = np.flatnonzero(bits[: END_TOKEN_ID + 1]).tolist()
        candidates = [
            token for token in allowed_ids if token == END_TOKEN_ID or 32 <= token < 127
        ] or allowed_ids
        assert candidates, f"no token is allowed after {output!r}"
        token = rng.choice(candidates)
        value_ends = [ord(letter) for letter in '"]}<' if ord(letter) in candidates]
        if value_ends and rng.random() < 0.3:
            token = rng.choice(value_ends)
        assert len(output) < 20000, f"no end: {output[:200]!r}"
        assert matcher.accept_token(token)
        if token == END_TOKEN_ID:
            return output.decode()
        output += bytes([token])


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "glm", "deepseek_v32"])
def test_arguments_in_tags_must_match_the_schema(name: str) -> None:
    grammar = ParserFactory.choose(None, name).grammar([make_tool("rich", RICH_SCHEMA)], "required")
    assert grammar is not None
    valid_arguments = {"unit": "C", "count": 3, "who": None, "some": "x 1", "extra": [1]}
    assert accepts(grammar, render_calls(name, Call("rich", valid_arguments)))
    assert accepts(
        grammar, render_calls(name, Call("rich", {"text": '"<b>\n{1}', "unit": "C", **valid_arguments}))
    )
    for invalid_arguments in (
        {"unit": "K"},
        {"count": 21},
        {"short": "x"},
        {"short": "xxxxx"},
        {"mixed": "y"},
    ):
        arguments = valid_arguments | invalid_arguments
        ordered_arguments = {
            key: arguments[key] for key in [*RICH_SCHEMA["properties"], "extra"] if key in arguments
        }
        assert not accepts(grammar, render_calls(name, Call("rich", ordered_arguments))), invalid_arguments


def test_an_ambiguous_tagged_argument_may_have_either_type() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": ["string", "integer"]}},
        "required": ["a"],
    }
    grammar = ParserFactory.choose(None, "qwen3_coder").grammar([make_tool("f", schema)], "required")
    assert grammar is not None
    assert accepts(grammar, render_calls("qwen3_coder", Call("f", {"a": "x"})))
    assert accepts(grammar, render_calls("qwen3_coder", Call("f", {"a": 5})))
    assert not accepts(grammar, render_calls("qwen3_coder", Call("f", {"a": 5.5})))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^a$"}}}, "pattern"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "format"),
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "anyOf"),
        ({"properties": {"a": {"enum": ["1", 1]}}}, "enum"),
    ],
)
def test_keywords_that_cannot_be_enforced_in_tags_are_refused_but_accepted_in_json(
    schema: dict[str, Any], keyword: str
) -> None:
    with pytest.raises(UnsupportedSchemaError, match=keyword):
        ParserFactory.choose(None, "qwen3_coder").grammar([make_tool("f", schema)], "required")
    assert ParserFactory.choose(None, "hermes").grammar([make_tool("f", schema)], "required")


SEARCH = Call("search", {"text": "a", "count": 3})


def test_markers_can_be_special_tokens() -> None:
    marker_tokens = ("<|tool_call_start|>", "<|tool_call_end|>")
    parsers = ParserFactory.choose(None, "lfm2", "none", SPECIAL_TOKENS)
    text = f"Well. {render_calls('lfm2', SEARCH)}"
    grammar = parsers.strict_grammar(TOOLS, {"search"})
    assert accepts(grammar, text, marker_tokens)
    assert accepts(grammar, "Well.")
    assert not accepts(grammar, text.replace("3", '"3"'), marker_tokens)
    forced_grammar = parsers.grammar(TOOLS, "required")
    assert forced_grammar is not None
    assert accepts(forced_grammar, text.removeprefix("Well. "), marker_tokens)
    # The text of a special token, encoded as ordinary tokens, is not the special token.
    assert not accepts(forced_grammar, text.removeprefix("Well. "))


def test_a_strict_call_may_follow_a_marker_or_reasoning() -> None:
    parsers = ParserFactory.choose(None, "llama3_json", "think", SPECIAL_TOKENS)
    grammar = parsers.strict_grammar(TOOLS, {"search"}, in_reasoning=False)
    call = render_calls("llama3_json", SEARCH)
    marked_call = f"<|python_tag|>{call}"
    for text in ("Hi {", "", call, f"<think>hm {{</think>\n\n{call}", "<think>hm</think>Hi"):
        assert accepts(grammar, text), text
        assert not accepts(grammar, text.replace("3", '"3"')) or "3" not in text
    for text in (marked_call, f"So {marked_call}", f"<think>hm</think>{marked_call}"):
        assert accepts(grammar, text, ("<|python_tag|>",)), text
        assert not accepts(grammar, text.replace("3", '"3"'), ("<|python_tag|>",))
    assert not accepts(grammar, '{"name": 1}')


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v3", "deepseek_v31"])
def test_a_strict_call_is_enforced_without_its_outer_marker(name: str) -> None:
    grammar, call_text = make_strict_grammar(name), render_calls(name, SEARCH)
    outer_marker, inner_marker = TOOL_FORMATS[name].markers
    text = "Well. " + call_text.removeprefix(outer_marker)
    assert inner_marker in text
    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace("3", '"3"'))
    assert collect_calls(parse(ParserFactory.choose(None, name, "none").new(tools=TOOLS), text)[1:]) == [
        SEARCH
    ]


def test_strict_calls_need_a_format_without_a_mixture_of_text_and_token_markers() -> None:
    parsers = ParserFactory.choose(None, "qwen3_coder", "none", ["<tool_call>"])
    with pytest.raises(UnsupportedFeatureError, match="<tool_call> and <function="):
        parsers.strict_grammar(TOOLS, {"search"})
    with pytest.raises(UnsupportedFeatureError, match="--tool-call-parser"):
        ParserFactory.choose(None).strict_grammar(TOOLS, {"search"})


HARMONY = ParserFactory.choose(None, "harmony", "harmony", SPECIAL_TOKENS)
REASONING = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
COMMENTARY = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = render_calls("harmony", SEARCH)


def test_harmony_grammars_accept_channels_and_calls() -> None:
    grammar = HARMONY.strict_grammar(TOOLS, {"search"}, in_reasoning=False)
    for text in (REASONING + FINAL + "Hi", FINAL, REASONING + COMMENTARY + CALL, CALL):
        assert accepts(grammar, text, SPECIAL_TOKENS), text
    for text in (REASONING + CALL.replace("3", '"3"'), CALL + CALL, "Hi", FINAL + "Hi" + CALL):
        assert not accepts(grammar, text, SPECIAL_TOKENS), text
    forced_grammar = HARMONY.grammar(TOOLS, "required", allows_reasoning=True, in_reasoning=False)
    assert forced_grammar is not None
    assert accepts(forced_grammar, REASONING + CALL, SPECIAL_TOKENS)
    assert accepts(forced_grammar, CALL, SPECIAL_TOKENS)
    assert not accepts(forced_grammar, REASONING + FINAL + "Hi", SPECIAL_TOKENS)
    json_grammar = HARMONY.after_reasoning(Grammar("json_object"), in_reasoning=False)
    assert accepts(json_grammar, REASONING + FINAL + '{"a": 1}', SPECIAL_TOKENS)
    assert accepts(json_grammar, FINAL + "{}", SPECIAL_TOKENS)
    assert not accepts(json_grammar, "{}", SPECIAL_TOKENS)
    assert not accepts(json_grammar, REASONING + "{}", SPECIAL_TOKENS)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{REASONING}{FINAL}Hi <b>\n<|return|>", "Hm.", "Hi <b>\n", []),
        (f"{FINAL}Hi", "", "Hi", []),
        (f"{REASONING}{COMMENTARY}{CALL}", "Hm.", "I look.", [SEARCH]),
        (f"{REASONING}{CALL}<|call|>", "Hm.", "", [SEARCH]),
        (
            f"{REASONING[:-9]}assistant to=functions.now<|channel|>commentary json<|message|>{{}}",
            "Hm.",
            "",
            [Call("now")],
        ),
        ("to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}", "", "", [Call("now")]),
        (f"{FINAL}to=functions.now is a text", "", "to=functions.now is a text", []),
        (
            f"{REASONING}<|channel|>commentary to=functions.other <|constrain|>json<|message|>{{}}",
            "Hm.",
            None,
            [],
        ),
    ],
)
def test_harmony_output_is_parsed(
    text: str, reasoning: str, content: str | None, calls: list[Call], chunk_size: int
) -> None:
    events = parse(HARMONY.new(tools=TOOLS), text, (chunk_size,))
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == reasoning
    if content is not None:
        assert "".join(event.text for event in events if isinstance(event, Content)) == content
    assert collect_calls([event for event in events if not isinstance(event, Content | Reasoning)]) == calls


def test_a_grammar_allows_only_a_call_or_json_that_matches_its_schema() -> None:
    schema = Grammar("json_schema", json.dumps(STRICT_SCHEMA))
    for parsers in (
        ParserFactory.choose(None, "hermes", "think"),
        ParserFactory.choose(None, "llama3_json", "think"),
    ):
        grammar = parsers.calls_or_format_grammar(schema, TOOLS, {"search"}, in_reasoning=False)
        call = render_calls(parsers.tool_format_name or "", SEARCH)
        for text in ('{"text": "a", "count": 1}', call, f"<think>hm</think>\n{call}"):
            assert accepts(grammar, text), text
        for text in ('{"text": "a"}', "Hi", call.replace("3", '"3"'), f"{call} Hi"):
            assert not accepts(grammar, text), text
