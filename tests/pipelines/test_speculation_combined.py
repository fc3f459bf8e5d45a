"""Drafts do not change the outputs of batches with adapters, grammars, penalties and log probabilities."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adapters import write_adapter
from support.random_draws import num_examples
from support.speculation import run_scheduled
from support.tiny_llm import EOS, write_tiny_llm

from penstock.assembly import load_pipeline, load_tokenizer
from penstock.pipelines import PipelineConfig, TextGenerationPipeline
from penstock.pipelines.core import Grammar, SamplingParams, TextContext

pytest.importorskip("xgrammar")

pytestmark = pytest.mark.models
SCHEMA = '{"type": "object", "properties": {"name": {"enum": ["one", "two"]}}, "required": ["name"]}'
GRAMMARS = [None, Grammar("json_schema", SCHEMA), Grammar("regex", "(ab|cd){3,20}(yes|no), indeed")]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TextGenerationPipeline]]:
    target = write_tiny_llm(tmp_path_factory.mktemp("target"))
    draft = write_tiny_llm(tmp_path_factory.mktemp("draft"), num_hidden_layers=1)
    adapter = write_adapter(target, tmp_path_factory.mktemp("adapter"))
    common_values = {
        "model_path": str(target),
        "deterministic": True,
        "kv_cache_block_size": 16,
        "max_batch_size": 6,
        "lora": (f"tone={adapter}",),
        "adaptive_speculation": False,
    }
    settings_by_name: dict[str, dict[str, Any]] = {
        "plain": {},
        "ngram": {"speculative_method": "ngram", "ngram_min": 1},
        "draft model": {"draft_model_path": str(draft), "num_speculative_tokens": 3},
        "target as draft model": {"draft_model_path": str(target), "num_speculative_tokens": 5},
    }
    pipelines_ = {name: open_from_values(common_values | values) for name, values in settings_by_name.items()}
    yield pipelines_
    for pipeline in pipelines_.values():
        assert pipeline.grammars is not None
        pipeline.grammars.close()


def open_from_values(values: dict[str, Any]) -> TextGenerationPipeline:
    config = PipelineConfig.from_flat(values)
    return load_pipeline(config, load_tokenizer(config))


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    prompt = draw(st.lists(st.integers(0, 7), min_size=1, max_size=40))
    temperature = draw(st.sampled_from([0.0, 1.0]))
    grammar = draw(st.sampled_from(GRAMMARS))
    # A grammar may force a banned token, which would end the request.
    banned_ids = draw(st.sampled_from([None, [5, 64]])) if grammar is None else None
    banned_sequences = draw(st.sampled_from([None, [[3, 4], [5, 5], [3, 3, 3]]])) if grammar is None else None
    return {
        "tokens": prompt,
        "max_new_tokens": draw(st.integers(1, 40)),
        "adapter": draw(st.sampled_from([None, "tone"])),
        "grammar": grammar,
        "log_probabilities": draw(st.sampled_from([None, 2])),
        "log_probabilities_echo": draw(st.booleans()),
        "eos_sequences": draw(st.sampled_from([[], [[3, 4]]])),
        "sampling_params": SamplingParams(
            temperature=temperature,
            top_k=-1,
            seed=draw(st.integers(0, 9)),
            top_p=draw(st.sampled_from([1.0, 0.9])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.8])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
            logit_bias=draw(st.sampled_from([None, {3: 4.0}])),
            banned_token_ids=banned_ids,
            banned_sequences=banned_sequences,
        ),
    }


def make_request_context(number: int, request: dict[str, Any]) -> TextContext:
    fields = {name: value for name, value in request.items() if name not in ("tokens", "max_new_tokens")}
    return TextContext(
        prompt="",
        tokens=np.array(request["tokens"]),
        max_length=len(request["tokens"]) + request["max_new_tokens"],
        eos_token_ids={EOS},
        request_id=str(number),
        **fields,
    )


@settings(max_examples=num_examples(8))
@given(
    batch=st.lists(requests(), min_size=1, max_size=6), max_batch_input_tokens=st.sampled_from([12, 40, 400])
)
def test_any_batch_gives_the_output_of_plain_decoding(
    pipelines: dict[str, TextGenerationPipeline], batch: list[dict[str, Any]], max_batch_input_tokens: int
) -> None:
    result = {}
    for name, pipeline in pipelines.items():
        contexts = [make_request_context(number, request) for number, request in enumerate(batch)]
        while not all(pipeline.ready(context) for context in contexts):
            time.sleep(0.001)
        result[name], _ = run_scheduled(
            pipeline,
            contexts,
            max_batch_size=6,
            max_batch_input_tokens=max_batch_input_tokens,
            min_chunk_size=4,
        )
    for name, outputs in result.items():
        assert outputs == result["plain"], name


def test_drafts_were_proposed_and_accepted_and_tokens_were_forced(
    pipelines: dict[str, TextGenerationPipeline],
) -> None:
    """The test before this one would also pass if no drafts were proposed."""
    for name in ("ngram", "draft model", "target as draft model"):
        stats = pipelines[name].speculation_stats
        assert stats.num_proposed, name
        assert stats.num_forced, name
    assert pipelines["target as draft model"].speculation_stats.num_accepted
