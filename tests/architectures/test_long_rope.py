"""LongRoPE across ``original_max_position_embeddings``: tokens and scores equal a full recomputation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import (
    load_in_transformers,
    make_tiny_config,
    transformers_greedy,
    write_checkpoint,
)
from support.pipeline_steps import generate_tokens, make_context, open_pipeline, random_tokens
from support.tiny_llm import write_tiny_llm

from penstock import LLM, SamplingParams
from penstock.pipelines.core import TextContext
from penstock.scheduler import Scheduler

pytestmark = pytest.mark.models

ORIGINAL_LENGTH = 40
PROMPT = random_tokens(30, 130, seed=3)
NUM_NEW_TOKENS = 16
"""Number of generated tokens; after `PROMPT`, the sequence crosses `ORIGINAL_LENGTH`, "the limit" below."""
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 5.0, 7.5]}


def make_config(family: str) -> dict[str, Any]:
    rope = FACTORS | {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL_LENGTH}
    changed_values = {
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        "rope_scaling": rope | {"type": "longrope"},
        "sliding_window": 24,
    }
    if family == "llama":
        changed_values = {"rope_parameters": rope | {"rope_theta": 500.0}, "rope_theta": None}
    config = make_tiny_config(family) | changed_values
    return {key: value for key, value in config.items() if value is not None}


@pytest.fixture(scope="module", params=["phi3", "llama"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llm(tmp_path_factory.mktemp(request.param))  # the LLM below needs its tokenizer
    return write_checkpoint(folder, make_config(request.param))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return load_in_transformers(checkpoint)


def recompute_scores(reference: Any, tokens: list[int], start: int) -> list[float]:
    """Return the log probabilities of the tokens from ``start`` on, each from a forward over its prefix."""
    result = []
    with torch.inference_mode():
        for end in range(start, len(tokens)):
            logits = reference(torch.tensor([tokens[:end]]), use_cache=False).logits[0, -1]
            result.append(float(logits.float().log_softmax(-1)[tokens[end]]))
    return result


def assert_scores(actual_scores: list[float], expected: list[float]) -> None:
    assert len(actual_scores) == len(expected)
    max_error = max(
        abs(actual - reference) for actual, reference in zip(actual_scores, expected, strict=True)
    )
    assert max_error < 1e-3, (
        max_error,
        [round(a - b, 3) for a, b in zip(actual_scores, expected, strict=True)],
    )


def run_scheduler(
    pipeline: Any, contexts: list[TextContext], num_steps: int = 1, **limits: int
) -> list[list[float]]:
    """Run contexts through the scheduler, and return the log probabilities of each answer."""
    scheduler = Scheduler(pipeline, max_batch_size=8, **limits)
    scores: dict[str, list[float]] = {}
    for context in contexts:
        scheduler.submit(context)
        scores[context.request_id] = []
    while scheduler.has_work:
        for request_id, response in scheduler.step(num_steps).items():
            scores[request_id] += [
                token.log_probabilities.token_log_probabilities[-1]
                for token in response.tokens
                if token.log_probabilities is not None
            ]
        assert not scheduler.failures
    return list(scores.values())


def sampling_params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=-1, seed=seed)


@pytest.mark.parametrize("max_batch_tokens", [512, 16])
def test_scores_of_generated_tokens_equal_a_recomputation(
    checkpoint: Path, reference: Any, max_batch_tokens: int
) -> None:
    """The batch has sequences below, across and beyond the limit. Steps of 16 tokens split the prompts."""
    pipeline = open_pipeline(checkpoint, kv_cache_block_size=16)
    lengths = (5, 30, 31, ORIGINAL_LENGTH - 1, ORIGINAL_LENGTH, ORIGINAL_LENGTH + 1, 60)
    contexts = [
        make_context(
            random_tokens(n, 130, seed=n),
            NUM_NEW_TOKENS,
            log_probabilities=1,
            sampling_params=sampling_params(n),
        )
        for n in lengths
    ]
    scores = run_scheduler(pipeline, contexts, max_batch_input_tokens=max_batch_tokens, min_chunk_size=4)
    for context, actual_scores, length in zip(contexts, scores, lengths, strict=True):
        assert_scores(actual_scores, recompute_scores(reference, context.all_tokens.tolist(), length))


def test_echoed_scores_of_generated_tokens_equal_the_scores_of_their_generation(checkpoint: Path) -> None:
    """Checks the tokens that are generated with the long factors."""
    pipeline = open_pipeline(checkpoint, kv_cache_block_size=16)
    context = make_context(PROMPT, NUM_NEW_TOKENS, log_probabilities=1, sampling_params=sampling_params(1))
    (generated_scores,) = run_scheduler(pipeline, [context])
    tokens = context.all_tokens.tolist()
    echo_context = make_context(tokens, 1, log_probabilities=1, log_probabilities_echo=True)
    log_probabilities = pipeline.execute({"echo": echo_context})["echo"].tokens[0].log_probabilities
    assert log_probabilities is not None
    # Index of the first token that is sampled with the long factors.
    first_long_position = ORIGINAL_LENGTH + 1
    actual_scores = log_probabilities.token_log_probabilities[:-1][first_long_position - 1 :]
    assert_scores(generated_scores[first_long_position - len(PROMPT) :], actual_scores)


@pytest.mark.parametrize("num_steps", [1, 2, 7, 100])
def test_greedy_tokens_equal_a_recomputation(checkpoint: Path, reference: Any, num_steps: int) -> None:
    expected = greedy_continuation(reference, PROMPT, NUM_NEW_TOKENS)
    pipeline = open_pipeline(checkpoint, kv_cache_block_size=16)
    assert generate_tokens(pipeline, [make_context(PROMPT, NUM_NEW_TOKENS)], num_steps) == [expected]
    context = make_context(PROMPT, NUM_NEW_TOKENS)
    run_scheduler(pipeline, [context], num_steps, max_batch_input_tokens=16)
    assert context.generated_tokens.tolist() == expected
    if "phi3" in str(checkpoint):  # for Phi-3, transformers also recomputes the cache at the limit
        assert transformers_greedy(reference, PROMPT, NUM_NEW_TOKENS) == expected


def greedy_continuation(reference: Any, prompt: list[int], num_new_tokens: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        while len(tokens) < len(prompt) + num_new_tokens:
            tokens.append(int(reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_prefixes_computed_with_other_factors_are_not_reused(
    checkpoint: Path, reference: Any, prefix_caching: bool
) -> None:
    pipeline = open_pipeline(checkpoint, kv_cache_block_size=16, enable_prefix_caching=prefix_caching)
    long_prompt = random_tokens(60, 130, seed=3)
    assert long_prompt[:30] == PROMPT
    prompts = [long_prompt[:30], long_prompt, long_prompt[:35], long_prompt[:50], long_prompt[:30]]
    cached_counts = []
    for number, prompt in enumerate(prompts):
        params = sampling_params(number)
        context = make_context(prompt, NUM_NEW_TOKENS, log_probabilities=1, sampling_params=params)
        (actual_scores,) = run_scheduler(pipeline, [context])
        assert_scores(actual_scores, recompute_scores(reference, context.all_tokens.tolist(), len(prompt)))
        cached_counts.append(context.num_cached_tokens)
    assert cached_counts == ([0, 16, 16, 48, 16] if prefix_caching else [0] * 5)


def test_tokens_with_drafts_across_the_limit_equal_a_recomputation(checkpoint: Path, reference: Any) -> None:
    """Checks n-gram drafts and drafts of a draft model, whose own KV cache also crosses the limit."""
    prompt = [*PROMPT[:8]] * 4
    expected = greedy_continuation(reference, prompt, NUM_NEW_TOKENS)
    for options in ({"speculative_method": "ngram"}, {"draft_model_path": str(checkpoint)}):
        with LLM(
            str(checkpoint),
            quantization_encoding="float32",
            kv_cache_block_size=16,
            num_speculative_tokens=6,
            adaptive_speculation=False,
            **options,
        ) as llm:
            params = SamplingParams(max_new_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            assert output.token_ids == expected
            stats = llm.pipeline.speculation_stats
            # The draft model is the target model, so only a wrong cache of the draft could reject a draft.
            if "draft_model_path" in options:
                assert stats.num_accepted == stats.num_proposed > NUM_NEW_TOKENS // 2


def test_beams_that_cross_the_limit_equal_a_recomputation(
    checkpoint: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(
        str(checkpoint),
        quantization_encoding="float32",
        kv_cache_block_size=16,
        max_batch_size=6,
        max_batch_input_tokens=16,
    ) as llm:
        row_counts: list[int] = []
        execute = llm.pipeline.model.execute

        def count_execute(inputs: Any) -> Any:
            row_counts.append(len(inputs.tokens))
            return execute(inputs)

        monkeypatch.setattr(llm.pipeline.model, "execute", count_execute)
        options: dict[str, Any] = {"num_beams": 6, "num_return_sequences": 6, "max_new_tokens": 14}
        beams = llm.beam_search(PROMPT, ignore_eos=True, use_tqdm=False, **options)
    assert max(row_counts) == 16, "at the limit, the cache is recomputed in chunks of 16 tokens"
    for beam in beams:
        expected = recompute_scores(reference, [*PROMPT, *beam.token_ids], len(PROMPT))
        assert beam.score == pytest.approx(sum(expected) / 14, abs=1e-4)


def test_scores_of_several_answers_across_the_limit_equal_a_recomputation(
    checkpoint: Path, reference: Any
) -> None:
    """The scores of the prompt use the short factors, even after a recomputation with the long factors."""
    params = SamplingParams(max_new_tokens=NUM_NEW_TOKENS, temperature=1.0, seed=5, ignore_eos=True)
    with LLM(str(checkpoint), quantization_encoding="float32", kv_cache_block_size=16) as llm:
        outputs = llm.generate(PROMPT, params, logprobs=1, prompt_logprobs=1, n=3, use_tqdm=False)
    assert len(outputs) == 3
    prompt_scores = recompute_scores(reference, PROMPT, 1)
    for output in outputs:
        assert output.log_probabilities is not None
        assert output.prompt_log_probabilities is not None
        assert_scores(output.prompt_log_probabilities.token_log_probabilities, prompt_scores)
        tokens = [*PROMPT, *output.token_ids]
        expected = recompute_scores(reference, tokens, len(PROMPT))
        assert_scores(output.log_probabilities.token_log_probabilities, expected)


def test_equal_short_and_long_factors_need_no_recomputation(tmp_path: Path) -> None:
    config = make_config("llama")
    config["rope_parameters"] |= {"long_factor": FACTORS["short_factor"]}
    pipeline = open_pipeline(write_checkpoint(tmp_path, config))
    assert pipeline.model.kv_cache_spec is not None
    assert pipeline.model.kv_cache_spec.key_limits == ()
    model: Any = pipeline.model
    assert not model.network.is_length_dependent
    assert math.isclose(model.network.rotaries[0].config.max_positions, ORIGINAL_LENGTH)
