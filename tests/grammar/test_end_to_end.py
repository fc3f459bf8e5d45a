"""Structured output through `LLM`, on the embedded model."""

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


def outputs(llm: LLM, grammar: Grammar, **params: Any) -> list[Any]:
    sampling = SamplingParams(**{"max_new_tokens": 100, "top_k": -1, "seed": 3, **params})
    return llm.generate(PROMPTS, sampling, use_tqdm=False, grammar=grammar)


def test_answers_validate(llm: LLM) -> None:
    for one in outputs(llm, Grammar("json_schema", json.dumps(SCHEMA))):
        jsonschema.validate(json.loads(one.text), SCHEMA)
    for one in outputs(llm, Grammar("choice", '["yes", "no"]')):
        assert one.text in ("yes", "no")


def test_jumping_ahead_changes_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar("regex", "a-[0-9]{3}é日本-(?:x|y)")
    before = llm.pipeline.speculation_stats.num_forced
    jumping = outputs(llm, grammar)
    assert llm.pipeline.speculation_stats.num_forced > before
    monkeypatch.setattr(drafting, "forced_tokens", lambda context, limit, vocabulary: [])
    stepping = outputs(llm, grammar)
    assert [one.text for one in jumping] == [one.text for one in stepping]
    assert [list(one.token_ids) for one in jumping] == [list(one.token_ids) for one in stepping]


def test_what_cannot_be_honoured_is_refused(llm: LLM) -> None:
    with pytest.raises(UnsupportedSchemaError, match="uniqueItems"):
        outputs(llm, Grammar("json_schema", '{"type": "array", "uniqueItems": true}'))
    with pytest.raises(UnsupportedFeatureError, match="ignore_eos"):
        outputs(llm, Grammar("json_schema", "{}"), ignore_eos=True)
