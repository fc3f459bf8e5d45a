"""The effect of encodings on the embedded model, with texts that it generated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.bench.quality import Quality, compare, sample_texts, scores, write_rounded


def open_model(model: str, encoding: str) -> LLM:
    options: dict[str, Any] = {"enable_prefix_caching": False, "max_length": 256, "max_batch_size": 8}
    return LLM(model, quantization_encoding=encoding, num_threads=1, **options)


@pytest.fixture(scope="module")
def exact() -> Iterator[LLM]:
    with open_model("demo", "float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def texts(exact: LLM) -> list[list[int]]:
    return sample_texts(exact, 0, count=8, length=192)


@pytest.fixture(scope="module")
def rounded(exact: LLM, texts: list[list[int]]) -> Quality:
    return quality(exact, texts, "bfloat16")


def quality(exact: LLM, texts: list[list[int]], encoding: str, model: str = "demo") -> Quality:
    with open_model(model, encoding) as llm:
        return compare(exact, llm, texts)


def test_int8_is_within_a_percent_of_bfloat16(exact: LLM, texts: list[list[int]], rounded: Quality) -> None:
    found = quality(exact, texts, "int8")
    assert found.perplexity == pytest.approx(rounded.perplexity, rel=0.01)
    assert rounded.divergence < found.divergence < 0.005
    assert found.agreement > 0.97


def test_int4_is_no_worse_than_plain_rounding(
    exact: LLM, texts: list[list[int]], rounded: Quality, tmp_path: Path
) -> None:
    write_rounded(exact.config.model.checkpoint, tmp_path)
    plain = quality(exact, texts, "bfloat16", str(tmp_path))
    found = quality(exact, texts, "int4")
    assert found.divergence <= plain.divergence
    assert found.perplexity <= 1.002 * plain.perplexity
    assert found.divergence > rounded.divergence


def test_a_model_compared_with_itself(exact: LLM, texts: list[list[int]]) -> None:
    found = compare(exact, exact, texts[:2])
    assert (found.divergence, found.agreement, found.num_tokens) == (0, 1, 2 * 191)


def test_scores_are_those_of_the_texts(exact: LLM, texts: list[list[int]]) -> None:
    """The texts are sampled from these distributions, so their tokens have high probability."""
    (found,) = scores(exact, texts[:1])
    assert found.shape == (192, exact.tokenizer.vocab_size)
    assert float(found.exp().sum(-1).sub(1).abs().max()) < 1e-4
    right = float(found[:-1].gather(1, as_targets(texts[0][1:])).mean())
    shifted = float(found[:-1].gather(1, as_targets(texts[0][:-1])).mean())
    assert right > -2
    assert shifted < right - 3


def as_targets(tokens: list[int]) -> Any:
    import torch

    return torch.tensor(tokens)[:, None]


def test_texts_follow_from_the_seed(exact: LLM, texts: list[list[int]]) -> None:
    assert sample_texts(exact, 0, count=2, length=20) == [text[:20] for text in texts[:2]]
    assert sample_texts(exact, 0, count=2, length=20, seed=1)[0] == texts[1][:20]
