"""Requests: their string form, refused values, and grammars."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock.errors import InputError
from penstock.pipelines.core import AudioGenerationRequest, Grammar, SamplingParams, TokenGeneratorRequest


def test_a_request_prints_its_id_and_limit() -> None:
    request = TokenGeneratorRequest("r1", 0, "demo")
    assert str(request) == "Id: r1"
    limited_request = dataclasses.replace(request, sampling_params=SamplingParams(max_new_tokens=7))
    assert str(limited_request) == "Id: r1, MaxNewTokens: 7"


def test_a_request_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TokenGeneratorRequest("r1", 0, "demo").index = 3  # type: ignore[misc]


@pytest.mark.parametrize("fields", [{"input": "hi"}, {"prompt": "hi"}, {"prompt": [1]}, {"input": ""}])
def test_a_speech_request_accepts_a_text_or_token_ids(fields: dict[str, Any]) -> None:
    assert AudioGenerationRequest("r1", 0, "demo", **fields).audio_prompt_tokens == []


@pytest.mark.parametrize("error", [RuntimeError, ValueError, InputError])
def test_a_speech_request_without_text_and_token_ids_is_refused(error: type[Exception]) -> None:
    with pytest.raises(error, match="either token_ids or input must be provided"):
        AudioGenerationRequest("r1", 0, "demo")


def test_grammars_are_compared_by_kind_and_text() -> None:
    assert Grammar("json_object") == Grammar("json_object", "")
    assert len({Grammar("regex", "a"), Grammar("regex", "a"), Grammar("ebnf", "a")}) == 2


def test_a_grammar_of_an_unknown_kind_or_without_a_string_is_refused() -> None:
    with pytest.raises(InputError, match=r"one of json_schema, .*, was 'lark'"):
        Grammar("lark", "x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must be a string, was dict"):
        Grammar("json_schema", {})  # type: ignore[arg-type]
