"""Every decoder architecture gives the logits and the greedy tokens of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import transformers_greedy, transformers_logits
from support.pipeline_steps import (
    append_token,
    generate_tokens,
    make_context,
    open_pipeline,
    random_tokens,
    step_logits,
)

from penstock.pipelines import TextGenerationPipeline

pytestmark = pytest.mark.models


@pytest.fixture(scope="module", params=["best", "reference"])
def pipeline(checkpoint: Path, request: pytest.FixtureRequest) -> TextGenerationPipeline:
    return open_pipeline(checkpoint, kernels=request.param, kv_cache_block_size=16)


@pytest.fixture(scope="module")
def vocab_size(reference: Any) -> int:
    return int(reference.config.vocab_size)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that no error exceeds 1e-4, or 1e-4 standard deviations of the logits if that is more."""
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@pytest.mark.matrix
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 70])
def test_logits_of_a_prefill_equal_transformers(
    pipeline: TextGenerationPipeline, reference: Any, vocab_size: int, length: int
) -> None:
    tokens = random_tokens(length, vocab_size, seed=length)
    context = make_context(tokens)
    assert_close(step_logits(pipeline, [context])[0], transformers_logits(reference, tokens))
    pipeline.release(context)


@pytest.mark.matrix
@pytest.mark.parametrize("chunks", [[1, 69], [16, 16, 38], [33, 1, 36], [7] * 10])
def test_logits_of_a_chunked_prefill_equal_transformers(
    pipeline: TextGenerationPipeline, reference: Any, vocab_size: int, chunks: list[int]
) -> None:
    tokens = random_tokens(70, vocab_size, seed=3)
    expected = transformers_logits(reference, tokens)
    # Echo turns off the prefix cache, so all rows are computed.
    context = make_context(tokens, log_probabilities_echo=True)
    for chunk in chunks:
        start = context.start_idx
        context.set_token_indices(active_idx=start + chunk)
        assert_close(step_logits(pipeline, [context])[0], expected[start : start + chunk])
        append_token(pipeline, context, 0)
    assert context.is_done is False
    pipeline.release(context)


def test_logits_of_decode_steps_equal_transformers(
    pipeline: TextGenerationPipeline, reference: Any, vocab_size: int
) -> None:
    tokens = random_tokens(60, vocab_size, seed=4)
    expected = transformers_logits(reference, tokens)
    context = make_context(tokens[:20])
    step_logits(pipeline, [context])
    for position in range(20, 60):
        append_token(pipeline, context, tokens[position])
        assert_close(step_logits(pipeline, [context])[0], expected[position : position + 1])
    pipeline.release(context)


def test_logits_of_a_mixed_batch_equal_transformers(
    pipeline: TextGenerationPipeline, reference: Any, vocab_size: int
) -> None:
    """One forward has a whole prompt, a middle chunk, a last chunk and a single token, of four requests."""
    token_lists = [random_tokens(length, vocab_size, seed=length) for length in (23, 50, 41, 30)]
    full_prompt, middle_chunk, last_chunk = (
        make_context(tokens, log_probabilities_echo=True) for tokens in token_lists[:3]
    )
    single_token = make_context(token_lists[3][:-1], log_probabilities_echo=True)
    for context, num_computed, stop in ((middle_chunk, 17, 35), (last_chunk, 18, 41)):
        context.set_token_indices(active_idx=num_computed)
        step_logits(pipeline, [context])
        append_token(pipeline, context, 0)
        context.set_token_indices(active_idx=stop)
    step_logits(pipeline, [single_token])
    append_token(pipeline, single_token, token_lists[3][-1])
    contexts = [full_prompt, middle_chunk, last_chunk, single_token]
    for context, tokens, logits in zip(contexts, token_lists, step_logits(pipeline, contexts), strict=True):
        assert_close(logits, transformers_logits(reference, tokens)[context.start_idx : context.active_idx])
        pipeline.release(context)


@pytest.fixture(scope="module")
def greedy_continuations(reference: Any, vocab_size: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts, each with its greedy continuation in transformers."""
    prompts = [random_tokens(length, vocab_size, seed=length) for length in (5, 40)]
    return [(prompt, transformers_greedy(reference, prompt, 30)) for prompt in prompts]


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("num_steps", [1, 7])
def test_greedy_tokens_equal_transformers(
    pipeline: TextGenerationPipeline, greedy_continuations: list[tuple[list[int], list[int]]], num_steps: int
) -> None:
    contexts = [make_context(prompt, 30) for prompt, _ in greedy_continuations]
    assert generate_tokens(pipeline, contexts, num_steps) == [tokens for _, tokens in greedy_continuations]
