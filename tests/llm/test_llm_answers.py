"""`LLM`: several answers per prompt, log probabilities, grammars, adapters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import load_in_transformers, transformers_logits
from support.tiny_llm import write_tiny_llm

from penstock import LLM, GenerationOutput, SamplingParams
from penstock.errors import InputError, UnknownParameterError, UnsupportedFeatureError
from penstock.pipelines.core import Grammar, LogProbabilities, TextContext
from penstock.pipelines.core.randomness import splitmix64
from penstock.scheduler import OverlappedScheduler

pytestmark = pytest.mark.models

SAMPLED = SamplingParams(temperature=1.0, top_k=-1, seed=11, max_new_tokens=12)
PROMPT = "A prompt that fills more than two blocks of sixteen tokens"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def shared_llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), kv_cache_block_size=16, max_batch_size=8, deterministic=True) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    assert not shared_llm._scheduler.has_work
    shared_llm.pipeline.kv.check_integrity()
    assert shared_llm.pipeline.kv.num_free_blocks == shared_llm.pipeline.kv.num_blocks


@pytest.fixture
def synchronous_llm(llm: LLM, model: Path) -> Iterator[LLM]:
    """Return an LLM that does not overlap steps, so `execute` computes each step."""
    if not isinstance(llm._scheduler, OverlappedScheduler):
        yield llm
        return
    options: dict[str, Any] = {"kv_cache_block_size": 16, "max_batch_size": 8, "deterministic": True}
    with LLM(str(model), overlap_steps=False, **options) as new_llm:
        yield new_llm


def list_token_ids(outputs: list[GenerationOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


# Several answers.


def test_several_answers_are_returned_in_order(llm: LLM) -> None:
    outputs = llm.generate(["One", "Two"], SAMPLED, n=3)
    assert [(output.prompt, output.index) for output in outputs] == [
        (prompt, i) for prompt in ("One", "Two") for i in range(3)
    ]
    assert len({tuple(tokens) for tokens in list_token_ids(outputs)}) == 6
    assert list_token_ids(outputs)[::3] == list_token_ids(llm.generate(["One", "Two"], SAMPLED)), (
        "answer 0 must equal the answer of a request with n=1"
    )
    for i in (1, 2):
        params = SamplingParams(temperature=1.0, top_k=-1, seed=splitmix64(11, i), max_new_tokens=12)
        assert list_token_ids(llm.generate("Two", params)) == [outputs[3 + i].token_ids]
    assert list_token_ids(llm.generate(["One", "Two"], SAMPLED, n=3)) == list_token_ids(outputs)


@pytest.mark.parametrize("prompt_logprobs", [None, 2])
def test_the_full_blocks_of_the_prompt_are_computed_once(
    prompt_logprobs: int | None, synchronous_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = synchronous_llm
    row_counts: list[int] = []
    execute = llm.pipeline.execute

    def count_execute(batch: Any, num_steps: int = 1) -> Any:
        row_counts.append(sum(context.active_length for context in batch.values()))
        return execute(batch, num_steps)

    monkeypatch.setattr(llm.pipeline, "num_steps_for", lambda seconds: 1)
    monkeypatch.setattr(llm.pipeline, "execute", count_execute)
    prompt = f"A prompt of this test only ({prompt_logprobs}), longer than three blocks of the cache"
    outputs = llm.generate(prompt, SAMPLED, n=4, prompt_logprobs=prompt_logprobs)
    num_cached = (len(prompt) - 1) // 16 * 16
    num_steps = sum(output.num_generated_tokens - 1 for output in outputs)
    assert sum(row_counts) == len(prompt) + 3 * (len(prompt) - num_cached) + num_steps
    assert [output.num_cached_tokens for output in outputs] == [0, num_cached, num_cached, num_cached]
    if prompt_logprobs is not None:
        prompt_rows = [output.prompt_log_probabilities for output in outputs]
        assert prompt_rows[0] is not None
        assert prompt_rows == [prompt_rows[0]] * 4


def test_best_of_ranks_by_mean_log_probability(llm: LLM) -> None:
    candidates = llm.generate(PROMPT, SAMPLED, n=6, logprobs=0)
    mean_scores = [float(np.mean(token_scores(answer.log_probabilities))) for answer in candidates]
    best_outputs = llm.generate(PROMPT, SAMPLED, n=2, best_of=6)
    order = sorted(range(6), key=lambda i: -mean_scores[i])[:2]
    assert list_token_ids(best_outputs) == [candidates[i].token_ids for i in order]
    assert [answer.score for answer in best_outputs] == pytest.approx([mean_scores[i] for i in order])
    assert [answer.index for answer in best_outputs] == [0, 1]
    assert best_outputs[0].log_probabilities is None, "log probabilities were not requested"
    assert candidates[0].score is None


def test_best_of_ignores_tokens_after_a_stop_string(llm: LLM) -> None:
    text = llm.generate(PROMPT, SAMPLED)[0].text
    params = SamplingParams(**param_fields(SAMPLED), stop=[text[3:6]])
    (truncated_output,) = llm.generate(PROMPT, params, best_of=1, logprobs=0)
    assert 0 < len(truncated_output.token_ids) < 12
    assert truncated_output.score == pytest.approx(np.mean(token_scores(truncated_output.log_probabilities)))


def test_an_empty_answer_is_ranked_last(llm: LLM) -> None:
    stop_id = llm.generate(PROMPT, SAMPLED)[0].token_ids[0]
    params = SamplingParams(temperature=1.0, top_k=-1, seed=11, max_new_tokens=12, stop_token_ids=[stop_id])
    outputs = llm.generate(PROMPT, params, n=3, best_of=3, prompt_logprobs=0)
    assert outputs[-1].token_ids == []
    assert outputs[-1].score == -np.inf
    assert [len(token_scores(output.prompt_log_probabilities)) for output in outputs] == [len(PROMPT) - 1] * 3


def test_chat_returns_several_answers(llm: LLM) -> None:
    conversation: list[Any] = [{"role": "user", "content": "Hello"}]
    outputs = llm.chat([conversation, conversation], SAMPLED, n=2, logprobs=1)
    assert [output.index for output in outputs] == [0, 1, 0, 1]
    assert list_token_ids(outputs)[:2] == list_token_ids(outputs)[2:]
    assert all(output.log_probabilities is not None for output in outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be an integer of at least 1, was 0"),
        ({"n": True}, "n must be .*, was True"),
        ({"n": 3, "best_of": 2}, "best_of is 2, less than n=3"),
        ({"best_of": 0}, "best_of must be an integer of at least 1, was 0"),
        ({"logprobs": -1}, "logprobs must be an integer of at least 0, was -1"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs must be .*, was 1.5"),
        ({"logprobs": False}, "logprobs must be .*, was False"),
        ({"adapter": ["a", "b", "c"]}, "3 adapter were given for 1 prompts"),
        ({"grammar": [None, None]}, "2 grammar were given for 1 prompts"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate("Hello", SAMPLED, **options)


def test_numpy_numbers_are_accepted_as_options(llm: LLM) -> None:
    options: dict[str, Any] = {"n": np.int64(2), "best_of": np.int32(3), "logprobs": np.uint8(1)}
    plain_output = llm.generate("Hello", SAMPLED, n=2, best_of=3, logprobs=1)
    assert list_token_ids(llm.generate("Hello", SAMPLED, **options, priority=np.int64(4))) == list_token_ids(
        plain_output
    )


@pytest.mark.parametrize("call", ["generate", "chat", "stream", "beam_search"])
def test_the_error_for_an_unknown_option_suggests_a_known_one(call: str, llm: LLM) -> None:
    with pytest.raises(
        UnknownParameterError, match=rf"^LLM.{call}: unknown parameter max_tokens; "
    ) as caught:
        getattr(llm, call)("Hello", max_tokens=3)
    expected_hint = (
        "max_new_tokens" if call == "beam_search" else "sampling_params=SamplingParams(max_new_tokens=...)"
    )
    assert str(caught.value).endswith(f"did you mean {expected_hint}?")


# Log probabilities.


def token_scores(rows: LogProbabilities | None) -> list[float]:
    assert rows is not None
    return rows.token_log_probabilities


def test_log_probabilities_equal_transformers(llm: LLM, model: Path) -> None:
    (output,) = llm.generate(PROMPT, SAMPLED, logprobs=3, prompt_logprobs=2)
    text = output.prompt_token_ids + output.token_ids
    scores = torch.log_softmax(transformers_logits(load_in_transformers(model), text), -1).numpy()
    result = token_scores(output.prompt_log_probabilities) + token_scores(output.log_probabilities)
    np.testing.assert_allclose(result, [scores[i, t] for i, t in enumerate(text[1:])], atol=2e-4)
    assert output.prompt_log_probabilities is not None
    assert output.log_probabilities is not None
    for top_n, rows, tokens in (
        (2, output.prompt_log_probabilities, output.prompt_token_ids[1:]),
        (3, output.log_probabilities, output.token_ids),
    ):
        for token, value, top_entries in zip(
            tokens, token_scores(rows), rows.top_log_probabilities, strict=True
        ):
            assert top_entries[token] == value
            assert len(top_entries) == top_n + (token not in list(top_entries)[:top_n])
            assert sorted(top_entries.values(), reverse=True)[:top_n] == list(top_entries.values())[:top_n]


def test_only_requested_log_probabilities_are_returned(llm: LLM) -> None:
    plain_output = llm.generate(PROMPT, SAMPLED)[0]
    assert (plain_output.log_probabilities, plain_output.prompt_log_probabilities) == (None, None)
    single_output = llm.generate(PROMPT, SAMPLED, logprobs=0)[0]
    assert single_output.prompt_log_probabilities is None
    assert single_output.log_probabilities is not None
    assert [list(top_entries) for top_entries in single_output.log_probabilities.top_log_probabilities] == [
        [t] for t in single_output.token_ids
    ]
    prompt_output = llm.generate(PROMPT, SAMPLED, prompt_logprobs=1)[0]
    assert prompt_output.log_probabilities is None
    assert prompt_output.num_cached_tokens == 0, (
        "scoring a prompt computes all its tokens, so none are read from the cache"
    )
    assert (
        list_token_ids([plain_output]) == list_token_ids([single_output]) == list_token_ids([prompt_output])
    )


def test_log_probabilities_are_bit_equal_in_batches_and_chunks(model: Path, llm: LLM) -> None:
    options: dict[str, Any] = {"logprobs": 2, "prompt_logprobs": 4}
    prompts = [PROMPT, "Hello", PROMPT[:30], "x"]
    single_outputs = [llm.generate(prompt, SAMPLED, **options)[0] for prompt in prompts]
    assert llm.generate(prompts, SAMPLED, **options) == single_outputs
    small_limits: dict[str, Any] = {
        "max_batch_input_tokens": 9,
        "max_batch_size": 3,
        "enable_prefix_caching": False,
    }
    with LLM(str(model), kv_cache_block_size=16, deterministic=True, **small_limits) as chunking_llm:
        assert chunking_llm.generate(prompts, SAMPLED, **options) == single_outputs


def test_tokens_after_a_stop_string_have_no_log_probabilities(llm: LLM) -> None:
    (full_output,) = llm.generate(PROMPT, SAMPLED, logprobs=1)
    for params in (
        SamplingParams(**param_fields(SAMPLED), stop=[full_output.text[4:6]]),
        SamplingParams(**param_fields(SAMPLED), stop_token_ids=[full_output.token_ids[5]]),
    ):
        (truncated_output,) = llm.generate(PROMPT, params, logprobs=1)
        assert 0 < len(truncated_output.token_ids) < 12
        assert (
            token_scores(truncated_output.log_probabilities)
            == token_scores(full_output.log_probabilities)[: len(truncated_output.token_ids)]
        )


def param_fields(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "top_k", "seed", "max_new_tokens")
    return {name: getattr(params, name) for name in names}


def test_a_prompt_is_scored_without_generating(llm: LLM) -> None:
    zero_token_params = SamplingParams(max_new_tokens=0)
    (output,) = llm.generate(PROMPT, zero_token_params, logprobs=1, prompt_logprobs=1)
    assert (output.text, output.token_ids, output.num_generated_tokens) == ("", [], 0)
    assert output.log_probabilities == LogProbabilities([], [])
    (generated_output,) = llm.generate(PROMPT, SAMPLED, prompt_logprobs=1)
    assert output.prompt_log_probabilities == generated_output.prompt_log_probabilities
    assert len(token_scores(output.prompt_log_probabilities)) == len(PROMPT) - 1
    (single_output,) = llm.generate([[65]], SAMPLED, prompt_logprobs=1)
    assert single_output.prompt_log_probabilities == LogProbabilities([], [])


def test_the_output_of_a_stream_has_log_probabilities(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SAMPLED, logprobs=2, prompt_logprobs=1)
    list(stream)
    (output,) = llm.generate(PROMPT, SAMPLED, logprobs=2, prompt_logprobs=1)
    assert stream.output == output


# All options in one batch.

MIXED_FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": -1, "seed": 1},
    {"top_k": 20, "top_p": 0.9, "seed": 2, "repetition_penalty": 1.3},
    {"top_k": -1, "min_p": 0.01, "seed": 3, "frequency_penalty": 1.0, "presence_penalty": -0.5},
    {"repetition_penalty": 1.8, "frequency_penalty": 0.5, "min_new_tokens": 9},
    {"top_k": 5, "seed": 4, "logit_bias": {65: 8.0, 66: 8.0}, "stop_token_ids": [65], "min_new_tokens": 4},
    {"top_k": -1, "seed": 5, "allowed_token_ids": list(range(60, 80)), "presence_penalty": 1.5},
    {"banned_token_ids": list(range(0, 259, 2)), "frequency_penalty": 0.7},
]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_steps": 4},
        {"max_batch_input_tokens": 20, "enable_prefix_caching": False},
        {"speculative_method": "ngram", "adaptive_speculation": False},
    ],
)
def test_a_mixed_batch_equals_single_prompts(config: dict[str, Any], model: Path, llm: LLM) -> None:
    params = [SamplingParams(max_new_tokens=24, **fields) for fields in MIXED_FIELDS]
    prompts = ["abcabcabcabc", "One two one two one two", "x", "The end. The end. The"] * 2
    options: dict[str, Any] = {"n": 2, "logprobs": 1}
    single_outputs = [llm.generate(*request, **options) for request in zip(prompts, params, strict=True)]
    with LLM(str(model), kv_cache_block_size=16, deterministic=True, **config) as configured_llm:
        batch_outputs = configured_llm.generate(prompts, params, **options)
        assert ("speculative_method" in config) == (
            configured_llm.pipeline.speculation_stats.num_accepted > 0
        )
    for expected, result in zip(chain.from_iterable(single_outputs), batch_outputs, strict=True):
        assert result.token_ids == expected.token_ids
        assert (result.text, result.finish_reason) == (expected.text, expected.finish_reason)
        assert result.log_probabilities == expected.log_probabilities


# Rules for tokens, grammars, adapters.


def test_token_rules_are_followed(llm: LLM) -> None:
    allowed_ids = [ord(letter) - 33 for letter in "abcxyz"]
    params = SamplingParams(
        **param_fields(SAMPLED), allowed_token_ids=allowed_ids, logit_bias={allowed_ids[0]: -100}
    )
    outputs = llm.generate(["One", "Two"], params, n=2)
    assert {token for tokens in list_token_ids(outputs) for token in tokens} <= set(allowed_ids[1:])
    greedy_tokens = llm.generate("One", SamplingParams(max_new_tokens=8))[0].token_ids
    banned_params = SamplingParams(max_new_tokens=8, banned_token_ids=greedy_tokens)
    assert not set(greedy_tokens) & set(llm.generate("One", banned_params)[0].token_ids)
    banned_sequence = list(greedy_tokens[3:6])
    params = SamplingParams(max_new_tokens=8, banned_sequences=[banned_sequence])
    new_tokens = llm.generate("One", params)[0].token_ids
    assert list(new_tokens[:5]) == list(greedy_tokens[:5])
    assert all(list(new_tokens[start : start + 3]) != banned_sequence for start in range(len(new_tokens)))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"logit_bias": {1: 1.0, 259: 1.0}}, "logit_bias has 259: ids are integers from 0 to 258"),
        ({"allowed_token_ids": [300, 1]}, "allowed_token_ids has 300"),
        ({"banned_token_ids": [259]}, "banned_token_ids has 259"),
        ({"banned_sequences": [[1, 259]]}, "banned_sequences has 259"),
        ({"banned_token_ids": list(range(259))}, "banned_token_ids has all 259 tokens of the model"),
        ({"allowed_token_ids": [256], "min_new_tokens": 2}, "each of the 1 tokens of allowed_token_ids"),
    ],
)
def test_invalid_and_contradictory_token_rules_are_refused(
    rules: dict[str, Any], message: str, llm: LLM
) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate("Hello", SamplingParams(**rules))


def test_a_grammar_applies_only_to_its_prompt(llm: LLM) -> None:
    grammar = Grammar("regex", "[0-9]{3}")
    unconstrained_output, constrained_output = llm.generate(["One", "Two"], SAMPLED, grammar=[None, grammar])
    assert constrained_output.text.isdigit()
    assert (len(constrained_output.text), constrained_output.finish_reason) == (3, "stop")
    assert unconstrained_output.token_ids == llm.generate("One", SAMPLED)[0].token_ids


def test_a_response_format_constrains_the_output(llm: LLM) -> None:
    schema = {"enum": ["yes", "no"]}
    (output,) = llm.generate("Well?", SAMPLED, response_format={"type": "json_schema", "json_schema": schema})
    assert output.text in ('"yes"', '"no"')


def test_waiting_for_a_grammar_sleeps_between_checks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake check reports the grammar as ready only after five sleeps."""
    checks: list[str] = []
    sleeps: list[float] = []

    def ready(context: TextContext) -> bool:
        checks.append(context.request_id)
        return len(sleeps) >= 5

    monkeypatch.setattr(llm._scheduler, "_ready", ready)
    monkeypatch.setattr("penstock.llm.batch_runner.time.sleep", sleeps.append)
    assert len(llm.generate("Hello", SAMPLED)) == 1
    assert len(sleeps) == 5
    assert len(checks) <= 12
    assert all(0 < sleep <= 0.01 for sleep in sleeps)


def test_an_unknown_adapter_is_refused(llm: LLM) -> None:
    with pytest.raises((InputError, UnsupportedFeatureError), match="adapter"):
        llm.generate("Hello", SAMPLED, adapter="mine")


def test_closing_closes_the_grammar_compiler(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close_calls: list[str] = []
    with LLM(str(model)) as llm:
        grammars = llm.pipeline.grammars
        assert grammars is not None
        monkeypatch.setattr(grammars, "close", lambda: close_calls.append("yes"))
    assert close_calls == ["yes"]
