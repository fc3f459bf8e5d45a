"""Log probabilities, compared with numpy and transformers, and for different batches, chunks and caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import load_in_transformers, transformers_logits
from support.pipeline_steps import make_context, open_pipeline, random_tokens
from support.random_draws import num_examples
from support.tiny_llm import VOCABULARY, write_tiny_llm

from penstock import log_probabilities
from penstock.log_probabilities import compute_log_probabilities
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import LogProbabilities, SamplingParams, TextContext

PROMPT = random_tokens(45, VOCABULARY, seed=8)


def expected_log_probabilities(row: np.ndarray, token: int, top_n: int) -> tuple[float, dict[int, float]]:
    scores = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64) - row.max()).sum()) - row.max()
    best_ids = np.argsort(-scores, kind="stable")[:top_n]
    return scores[token], {int(i): scores[i] for i in best_ids} | {token: scores[token]}


@settings(max_examples=num_examples(60))
@given(
    sequences=st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 9), st.booleans()), min_size=1, max_size=5
    ),
    seed=st.integers(0, 1000),
    max_logits=st.sampled_from([1, 50, 1 << 23]),
)
def test_log_probabilities_of_any_batch_equal_numpy(
    sequences: list[tuple[int, int, bool]], seed: int, max_logits: int
) -> None:
    """``sequences`` has (number of input tokens, top n, echo) of each sequence.

    A sequence with echo has one row of logits for each input token, and otherwise only one row.
    """
    rng, vocabulary = np.random.default_rng(seed), 8
    counts = [length if echo else 1 for length, _, echo in sequences]
    logits = rng.normal(0, 3, (sum(counts), vocabulary)).astype(np.float32)
    tokens = rng.integers(0, vocabulary, sum(length for length, _, _ in sequences))
    next_tokens = rng.integers(0, vocabulary, len(sequences))
    previous_max_logits, log_probabilities._MAX_LOGITS = log_probabilities._MAX_LOGITS, max_logits
    try:
        result = compute_log_probabilities(
            torch.from_numpy(tokens),
            torch.tensor(np.cumsum([0, *(length for length, _, _ in sequences)])),
            torch.from_numpy(logits),
            torch.tensor(np.cumsum([0, *counts])),
            torch.from_numpy(next_tokens),
            [top_n for _, top_n, _ in sequences],
            [echo for _, _, echo in sequences],
        )
    finally:
        log_probabilities._MAX_LOGITS = previous_max_logits
    row, first_token = 0, 0
    for (length, top_n, echo), count, sequence_result, next_token in zip(
        sequences, counts, result, next_tokens, strict=True
    ):
        if top_n == 0:
            assert sequence_result is None
        else:
            assert sequence_result is not None
            targets = [*tokens[first_token + 1 : first_token + length], next_token] if echo else [next_token]
            expected = [
                expected_log_probabilities(logits[row + i], int(t), top_n) for i, t in enumerate(targets)
            ]
            assert sequence_result.token_log_probabilities == pytest.approx(
                [value for value, _ in expected], abs=1e-5
            )
            for actual, (_, top_entries) in zip(sequence_result.top_log_probabilities, expected, strict=True):
                assert actual == pytest.approx(top_entries, abs=1e-5)
                assert list(actual) == list(top_entries), "sorted by descending log probability"
        row, first_token = row + count, first_token + length


def test_bfloat16_logits_are_computed_in_float32() -> None:
    offsets = torch.tensor([0, 1])
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    (sequence_result,) = compute_log_probabilities(
        torch.tensor([3]), offsets, logits, offsets, torch.tensor([7]), [1], [False]
    )
    assert sequence_result is not None
    value, _ = expected_log_probabilities(logits[0].float().numpy(), 7, 1)
    assert sequence_result.token_log_probabilities == pytest.approx([value], abs=1e-5)


def test_cut_keeps_the_top_n_and_the_chosen_token() -> None:
    rows = LogProbabilities([-3.0, -0.5], [{4: -1.0, 2: -2.0, 9: -3.0}, {7: -0.5, 1: -1.5}])
    assert rows.cut(0, [9, 7]) == LogProbabilities([-3.0, -0.5], [{9: -3.0}, {7: -0.5}])
    assert rows.cut(1, [9, 7]) == LogProbabilities([-3.0, -0.5], [{4: -1.0, 9: -3.0}, {7: -0.5}])
    assert rows.cut(5, [9, 7]) == rows


# The tests below run with deterministic=True, so that log probabilities are bit-equal.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def pipeline(model: Path) -> TextGenerationPipeline:
    return open_pipeline(model, deterministic=True, kv_cache_block_size=16)


def make_scored_context(echo: bool, salt: str, **params: Any) -> TextContext:
    """Return a context with log probabilities. Only contexts with the same ``salt`` share cached blocks."""
    return make_context(
        PROMPT,
        max_new_tokens=6,
        log_probabilities=3,
        log_probabilities_echo=echo,
        cache_salt=salt,
        sampling_params=SamplingParams(temperature=0.9, top_k=50, seed=4, **params),
    )


def run_context(
    pipeline: TextGenerationPipeline,
    context: TextContext,
    batch_contexts: list[TextContext] | None = None,
    chunks: list[int] | None = None,
    preempt_after: int | None = None,
) -> list[tuple[int, LogProbabilities | None]]:
    """Run a context and return its (token, log probabilities) pairs.

    Args:
        batch_contexts: other contexts in the batch.
        chunks: sizes of the first chunks of the prompt.
        preempt_after: number of tokens after which the context is preempted.
    """
    result: list[tuple[int, LogProbabilities | None]] = []
    batch_mates = {other_context.request_id: other_context for other_context in batch_contexts or []}
    chunks = list(chunks or [])
    while not context.is_done:
        if chunks:
            pipeline.kv.claim(context)
            context.set_token_indices(active_idx=context.start_idx + chunks.pop(0))
        responses = pipeline.execute({**batch_mates, context.request_id: context})
        result += [(int(t.next_token), t.log_probabilities) for t in responses[context.request_id].tokens]
        for request_id in [name for name, other_context in batch_mates.items() if other_context.is_done]:
            pipeline.release(batch_mates.pop(request_id))
        if preempt_after == len(result):
            pipeline.release(context)
            context.reset()
            preempt_after = None
    for remaining_context in (context, *batch_mates.values()):
        pipeline.release(remaining_context)
    return result


@pytest.mark.parametrize("echo", [False, True])
def test_log_probabilities_do_not_depend_on_batching_chunks_cache_or_preemption(
    echo: bool, pipeline: TextGenerationPipeline
) -> None:
    single_rows = run_context(pipeline, make_scored_context(echo, "first"))
    assert len(single_rows) == 6
    cached_context = make_scored_context(echo, "first")
    assert run_context(pipeline, cached_context) == single_rows
    assert cached_context.num_cached_tokens == (0 if echo else 32), (
        "a context with echo reads no cached blocks"
    )
    batch_mates = [
        make_context(random_tokens(9, VOCABULARY, seed=i), max_new_tokens=4, log_probabilities=i)
        for i in range(5)
    ]
    assert (
        run_context(pipeline, make_scored_context(echo, "batched"), batch_contexts=batch_mates) == single_rows
    )
    assert run_context(pipeline, make_scored_context(echo, "chunked"), chunks=[7, 1, 30]) == single_rows
    assert (
        run_context(pipeline, make_scored_context(echo, "preempted"), chunks=[44, 1], preempt_after=3)
        == single_rows
    )


def test_log_probabilities_do_not_depend_on_sampling_parameters(
    pipeline: TextGenerationPipeline, model: Path
) -> None:
    sampling: dict[str, Any] = {
        "repetition_penalty": 1.9,
        "frequency_penalty": 1.0,
        "logit_bias": {5: 30.0},
        "banned_token_ids": [6],
        "min_new_tokens": 5,
    }
    tokens, rows = zip(*run_context(pipeline, make_scored_context(True, "rules", **sampling)), strict=True)
    scores = torch.log_softmax(
        transformers_logits(load_in_transformers(model), [*PROMPT, *tokens]), -1
    ).numpy()
    values = [value for row in rows for value in row.token_log_probabilities]
    assert len(values) == len(PROMPT) - 1 + 6
    sequence = [*PROMPT, *tokens]
    expected = [scores[i, token] for i, token in enumerate(sequence[1:])]
    np.testing.assert_allclose(values, expected, atol=2e-4)
    top_lists = [top_entries for row in rows for top_entries in row.top_log_probabilities]
    for i, top_entries in enumerate(top_lists):
        assert sequence[i + 1] in top_entries
        assert len(top_entries) in (3, 4)
        assert max(top_entries, key=lambda token: top_entries[token]) == scores[i].argmax()
