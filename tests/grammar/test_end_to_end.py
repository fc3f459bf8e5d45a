"""Structured output of the demo model through `LLM`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from penstock import LLM, SamplingParams
from penstock.errors import UnsupportedFeatureError, UnsupportedSchemaError
from penstock.pipelines import drafting
from penstock.pipelines.core import Grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
}
PROMPTS = ["Once upon a time", "Tell me"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_length=256, quantization_encoding="float32") as llm:
        yield llm


def generate_outputs(llm: LLM, grammar: Grammar, **params: Any) -> list[Any]:
    sampling_params = SamplingParams(**{"max_new_tokens": 100, "top_k": -1, "seed": 3, **params})
    return llm.generate(PROMPTS, sampling_params, use_tqdm=False, grammar=grammar)


def test_outputs_match_their_grammar(llm: LLM) -> None:
    for output in generate_outputs(llm, Grammar("json_schema", json.dumps(SCHEMA))):
        jsonschema.validate(json.loads(output.text), SCHEMA)
    for output in generate_outputs(llm, Grammar("choice", '["yes", "no"]')):
        assert output.text in ("yes", "no")


def test_forced_tokens_do_not_change_the_output(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar("regex", "a-[0-9]{3}é日本-(?:x|y)")
    num_forced_before = llm.pipeline.speculation_stats.num_forced
    outputs_with_forced_tokens = generate_outputs(llm, grammar)
    assert llm.pipeline.speculation_stats.num_forced > num_forced_before
    monkeypatch.setattr(drafting, "forced_tokens", lambda context, limit, vocabulary: [])
    outputs_without_forced_tokens = generate_outputs(llm, grammar)
    assert [output.text for output in outputs_with_forced_tokens] == [
        output.text for output in outputs_without_forced_tokens
    ]
    assert [list(output.token_ids) for output in outputs_with_forced_tokens] == [
        list(output.token_ids) for output in outputs_without_forced_tokens
    ]


def test_unsupported_schemas_and_options_are_refused(llm: LLM) -> None:
    with pytest.raises(UnsupportedSchemaError, match="uniqueItems"):
        generate_outputs(llm, Grammar("json_schema", '{"type": "array", "uniqueItems": true}'))
    with pytest.raises(UnsupportedFeatureError, match="ignore_eos"):
        generate_outputs(llm, Grammar("json_schema", "{}"), ignore_eos=True)
