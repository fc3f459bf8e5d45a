"""The effect of encodings on the demo model, measured on texts that the model generated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.bench.quality import Quality, compare, log_probs_of_texts, sample_texts, write_rounded


def open_model(model: str, encoding: str) -> LLM:
    options: dict[str, Any] = {"enable_prefix_caching": False, "max_length": 256, "max_batch_size": 8}
    return LLM(model, quantization_encoding=encoding, num_threads=1, **options)


@pytest.fixture(scope="module")
def float32_llm() -> Iterator[LLM]:
    with open_model("demo", "float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def texts(float32_llm: LLM) -> list[list[int]]:
    return sample_texts(float32_llm, 0, count=8, length=192)


@pytest.fixture(scope="module")
def bfloat16_quality(float32_llm: LLM, texts: list[list[int]]) -> Quality:
    return measure_quality(float32_llm, texts, "bfloat16")


def measure_quality(float32_llm: LLM, texts: list[list[int]], encoding: str, model: str = "demo") -> Quality:
    with open_model(model, encoding) as llm:
        return compare(float32_llm, llm, texts)


def test_the_perplexity_of_int8_is_within_a_percent_of_bfloat16(
    float32_llm: LLM, texts: list[list[int]], bfloat16_quality: Quality
) -> None:
    int8_quality = measure_quality(float32_llm, texts, "int8")
    assert int8_quality.perplexity == pytest.approx(bfloat16_quality.perplexity, rel=0.01)
    assert bfloat16_quality.divergence < int8_quality.divergence < 0.005
    assert int8_quality.agreement > 0.97


def test_int4_is_no_worse_than_plain_rounding(
    float32_llm: LLM, texts: list[list[int]], bfloat16_quality: Quality, tmp_path: Path
) -> None:
    """The divergence is at most that of weights rounded to 4 bits. The perplexity may be 0.2 % higher."""
    write_rounded(float32_llm.config.model.checkpoint, tmp_path)
    rounded_quality = measure_quality(float32_llm, texts, "bfloat16", str(tmp_path))
    int4_quality = measure_quality(float32_llm, texts, "int4")
    assert int4_quality.divergence <= rounded_quality.divergence
    assert int4_quality.perplexity <= 1.002 * rounded_quality.perplexity
    assert int4_quality.divergence > bfloat16_quality.divergence


def test_a_model_compared_with_itself_has_no_error(float32_llm: LLM, texts: list[list[int]]) -> None:
    quality = compare(float32_llm, float32_llm, texts[:2])
    assert (quality.divergence, quality.agreement, quality.num_tokens) == (0, 1, 2 * 191)


def test_log_probabilities_are_aligned_with_the_tokens(float32_llm: LLM, texts: list[list[int]]) -> None:
    """The text is sampled from these distributions, so its tokens have a high probability."""
    (log_probabilities,) = log_probs_of_texts(float32_llm, texts[:1])
    assert log_probabilities.shape == (192, float32_llm.tokenizer.vocab_size)
    assert float(log_probabilities.exp().sum(-1).sub(1).abs().max()) < 1e-4
    aligned_mean = float(log_probabilities[:-1].gather(1, target_indices(texts[0][1:])).mean())
    shifted_mean = float(log_probabilities[:-1].gather(1, target_indices(texts[0][:-1])).mean())
    assert aligned_mean > -2
    assert shifted_mean < aligned_mean - 3


def target_indices(tokens: list[int]) -> Any:
    import torch

    return torch.tensor(tokens)[:, None]


def test_each_text_depends_only_on_the_sum_of_seed_and_index(
    float32_llm: LLM, texts: list[list[int]]
) -> None:
    assert sample_texts(float32_llm, 0, count=2, length=20) == [text[:20] for text in texts[:2]]
    assert sample_texts(float32_llm, 0, count=2, length=20, seed=1)[0] == texts[1][:20]
