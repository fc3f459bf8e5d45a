"""Trained checkpoints: the demo model, and the models of the shared data if they are available."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints import load_in_transformers, transformers_greedy, transformers_logits
from support.pipeline_steps import generate_tokens, make_context, open_pipeline, step_logits

from penstock.pipelines import TextTokenizer
from penstock.weights.hub import resolve_checkpoint

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball."
)


@pytest.fixture(params=["demo", "stories260K", "llama2xs"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    if request.param == "demo":
        return resolve_checkpoint("demo", "main")
    data: Path = request.getfixturevalue("shared_data")
    return data / "models" / request.param


@pytest.mark.parametrize("kernels", ["best", "reference"])
def test_logits_and_greedy_text_equal_transformers(checkpoint: Path, kernels: str) -> None:
    pipeline = open_pipeline(checkpoint, kernels=kernels)
    reference = load_in_transformers(checkpoint)
    prompt = TextTokenizer(checkpoint).encode_text("Once upon a time").tolist()
    (tokens,) = generate_tokens(pipeline, [make_context(prompt)], num_steps=4)
    assert tokens == transformers_greedy(reference, prompt, 100)
    sequence = prompt + tokens
    expected = transformers_logits(reference, sequence)
    logits = step_logits(pipeline, [make_context(sequence, log_probabilities_echo=True)])[0]
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)


def test_greedy_text_starts_with_the_known_story(shared_data: Path) -> None:
    checkpoint = shared_data / "models" / "stories260K"
    tokenizer = TextTokenizer(checkpoint)
    pipeline = open_pipeline(checkpoint)
    prompt = tokenizer.encode_text("Once upon a time").tolist()
    (tokens,) = generate_tokens(pipeline, [make_context(prompt, 40)])
    assert tokenizer.decode_ids(prompt + tokens).startswith(STORY)
