"""Speculation changes no text: every proposer against plain decoding in float32, by equality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import write_checkpoint
from support.running import context_of, generate, open_pipeline
from support.speculating import PROMPT, REPEATING, VOCABULARY, Oracle, mixed, outcome, scheduled, texts_of

from penstock.architectures.llama import tiny_config
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import SamplingParams, TextContext, TextGenerationStatus
from penstock.pipelines.speculative import AdaptiveDraftLength, FixedDraftLength, NGramProposer

pytestmark = pytest.mark.models

BLOCK_BYTES = 4 * 2 * 3 * 2 * 8 * 16  # float32, K and V, layers, kv heads, head dim, tokens a block


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), tiny_config())


@pytest.fixture
def pipeline(checkpoint: Path) -> TextGenerationPipeline:
    return open_pipeline(checkpoint, deterministic=True, kv_cache_block_size=16)


MISTAKES: dict[str, Callable[[int], bool]] = {
    "always right": lambda place: False,
    "always wrong": lambda place: True,
    "every third wrong": lambda place: place % 3 == 2,
    "wrong and right in turn": lambda place: place // 5 % 2 == 0,
}


@pytest.mark.parametrize("mistakes", MISTAKES)
def test_a_mixed_batch(pipeline: TextGenerationPipeline, mistakes: str) -> None:
    plain = outcome(pipeline, mixed())
    pipeline.proposer = oracle = Oracle(texts_of(plain), MISTAKES[mistakes], 5)
    assert outcome(pipeline, mixed(), num_steps=4) == plain
    assert sorted(oracle.released) == sorted(plain)
    stats = pipeline.speculation_stats
    assert stats.num_proposed == sum(len(draft) for draft, _ in oracle.seen)
    assert stats.num_accepted == sum(accepted for _, accepted in oracle.seen)
    assert stats.num_verified_steps == sum(bool(draft) for draft, _ in oracle.seen)
    assert stats.acceptance_rate == {"always right": 1, "always wrong": 0}.get(
        mistakes, pytest.approx(stats.num_accepted / stats.num_proposed)
    )
    if mistakes == "always right":
        assert stats.mean_tokens > 4


def test_each_token_of_a_verified_step_has_its_log_probabilities(
    pipeline: TextGenerationPipeline,
) -> None:
    def scored() -> TextContext:
        return context_of(PROMPT, 6, request_id="a", log_probabilities=2)

    plain = outcome(pipeline, [scored()])
    pipeline.proposer = Oracle(texts_of(plain), MISTAKES["always right"], 9)
    parts = pipeline.execute({"a": scored()})["a"].tokens
    assert [(part.next_token, part.log_probabilities) for part in parts] == plain["a"][:-1]
    assert all(len(part.log_probabilities.token_log_probabilities) == 1 for part in parts)


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize(
    "widths", [None, FixedDraftLength(3), AdaptiveDraftLength(6)], ids=["free", "fixed", "adaptive"]
)
def test_the_text_itself_as_proposer(pipeline: TextGenerationPipeline, least: int, widths: Any) -> None:
    plain = outcome(pipeline, mixed())
    pipeline.proposer, pipeline.draft_lengths = NGramProposer(least, 3), widths
    assert outcome(pipeline, mixed()) == plain
    assert pipeline.speculation_stats.num_proposed > (0 if isinstance(widths, AdaptiveDraftLength) else 10)


@pytest.mark.parametrize("seed", range(4))
def test_seeds(pipeline: TextGenerationPipeline, seed: int) -> None:
    def contexts() -> list[TextContext]:
        sampling = SamplingParams(temperature=1.0, top_k=(-1, 20)[seed % 2], top_p=0.9, seed=seed)
        prompts = (PROMPT, REPEATING, PROMPT[:3])
        return [context_of(p, 30, request_id=str(i), sampling_params=sampling) for i, p in enumerate(prompts)]

    plain = outcome(pipeline, contexts())
    pipeline.proposer = Oracle(texts_of(plain), lambda place: (place * 7 + seed) % 4 == 0, 4)
    assert outcome(pipeline, contexts()) == plain


@pytest.mark.parametrize("proposer", ["oracle", "ngram"])
def test_chunked_prompts_with_drafts(pipeline: TextGenerationPipeline, proposer: str) -> None:
    plain = outcome(pipeline, mixed())
    oracle = Oracle(texts_of(plain), MISTAKES["every third wrong"], 4)
    pipeline.proposer = oracle if proposer == "oracle" else NGramProposer(1, 3)
    limits = {"max_batch_size": 8, "max_batch_input_tokens": 13, "min_chunk_size": 3}
    given, _ = scheduled(pipeline, mixed(), **limits)
    assert given == plain
    assert pipeline.speculation_stats.num_accepted


@pytest.mark.parametrize("proposer", ["oracle", "ngram"])
def test_preemption(checkpoint: Path, pipeline: TextGenerationPipeline, proposer: str) -> None:
    plain = outcome(pipeline, mixed())
    small = open_pipeline(
        checkpoint,
        deterministic=True,
        kv_cache_block_size=16,
        max_length=80,
        max_batch_size=6,
        kv_cache_memory=BLOCK_BYTES * 13,
    )
    oracle = Oracle(texts_of(plain), MISTAKES["every third wrong"], 4)
    small.proposer = oracle if proposer == "oracle" else NGramProposer(1, 3)
    outcome(small, [context_of(PROMPT[:3], 1)]) if proposer == "ngram" else None
    given, scheduler = scheduled(small, mixed(), max_batch_size=6, max_batch_input_tokens=40)
    assert scheduler.num_preemptions
    assert given == plain
    assert small.speculation_stats.num_accepted


def test_through_the_prefix_cache(pipeline: TextGenerationPipeline) -> None:
    long = [*PROMPT, *PROMPT[:15]]
    plain = outcome(pipeline, [context_of(long, 30, request_id="a")])
    pipeline.proposer = Oracle(texts_of(plain), MISTAKES["every third wrong"], 4)
    context = context_of(long, 30, request_id="a")
    assert outcome(pipeline, [context]) == plain
    assert context.num_cached_tokens == 32
    more = [*long, *texts_of(plain)["a"][:20]]
    context = context_of(more, 10, request_id="a")
    pipeline.proposer = None
    assert texts_of(outcome(pipeline, [context]))["a"] == texts_of(plain)["a"][20:]
    assert context.num_cached_tokens == 64, "blocks that drafts have filled hold the accepted tokens alone"


@pytest.mark.parametrize("at", [0, 1, 3, 4])
def test_an_end_among_the_drafts(pipeline: TextGenerationPipeline, at: int) -> None:
    (text,) = generate(
        pipeline, [context_of(PROMPT, 30, sampling_params=SamplingParams(temperature=1, seed=1))]
    )
    assert text[at] not in text[:at]

    def context() -> TextContext:
        return TextContext(
            prompt="",
            max_length=60,
            tokens=np.array(PROMPT),
            eos_token_ids={text[at]},
            request_id="a",
            sampling_params=SamplingParams(temperature=1, seed=1),
        )

    plain = outcome(pipeline, [context()])
    assert plain["a"][-1] is TextGenerationStatus.END_OF_SEQUENCE
    pipeline.proposer = Oracle({"a": text}, MISTAKES["always right"], 4)
    assert outcome(pipeline, [context()]) == plain


def test_a_run_of_tokens_that_ends_the_output(pipeline: TextGenerationPipeline) -> None:
    (text,) = generate(pipeline, [context_of(PROMPT, 30)])

    def context() -> TextContext:
        return TextContext(
            prompt="", max_length=60, tokens=np.array(PROMPT), eos_sequences=[text[3:6]], request_id="a"
        )

    plain = outcome(pipeline, [context()])
    pipeline.proposer = Oracle({"a": text}, MISTAKES["always right"], 9)
    assert outcome(pipeline, [context()]) == plain
    assert texts_of(plain)["a"] == text[:5]


def test_min_new_tokens_holds_off_drafted_ends(pipeline: TextGenerationPipeline) -> None:
    (text,) = generate(pipeline, [context_of(PROMPT, 30)])

    def context() -> TextContext:
        return TextContext(
            prompt="",
            max_length=60,
            tokens=np.array(PROMPT),
            eos_token_ids=set(text),
            request_id="a",
            sampling_params=SamplingParams(min_new_tokens=7),
        )

    plain = outcome(pipeline, [context()])
    for drafts in (text, texts_of(plain)["a"]):
        pipeline.proposer = Oracle({"a": drafts}, MISTAKES["always right"], 5)
        assert outcome(pipeline, [context()]) == plain


class Careless(Oracle):
    """Drafts invalid token ids between valid ones."""

    def propose(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[list[int]]:
        return [[*draft[:2], bad, *draft[2:]] for draft, bad in zip(
            super().propose(contexts, limits), (-1, VOCABULARY, 10**12), strict=True)]  # fmt: skip


def test_invalid_draft_ids_are_dropped(pipeline: TextGenerationPipeline) -> None:
    def contexts() -> list[TextContext]:
        return [context_of(PROMPT[:n], 20, request_id=str(n)) for n in (5, 6, 7)]

    plain = outcome(pipeline, contexts())
    pipeline.proposer = careless = Careless(texts_of(plain), MISTAKES["always right"], 6)
    assert outcome(pipeline, contexts()) == plain
    assert max(len(draft) for draft, _ in careless.seen) == 2


def test_too_few_blocks_mean_fewer_drafts(checkpoint: Path) -> None:
    fixed = {"kv_cache_block_size": 16, "max_length": 64, "max_batch_size": 2, "deterministic": True}
    small = open_pipeline(checkpoint, kv_cache_memory=BLOCK_BYTES * 5, **fixed)

    def context(tokens: Sequence[int]) -> TextContext:
        return context_of(tokens, 30, request_id="a")

    plain = outcome(small, [context(PROMPT)])
    small.proposer = oracle = Oracle(texts_of(plain) | {"b": [1] * 9}, MISTAKES["always right"], 20)
    first, second = context(PROMPT), context_of(PROMPT[::-1], 1, request_id="b")
    response = small.execute({"a": first, "b": second})
    drafted = len(oracle.seen[0][0])
    assert 0 < drafted <= 18, "30 tokens of the prompt leave 2 places in two blocks; a third may not be free"
    assert len(response["a"].tokens) == drafted + 1
    small.release(second)
    small.release(first)
    assert outcome(small, [context(PROMPT)]) == plain


def test_a_step_is_no_larger_than_planned(checkpoint: Path) -> None:
    narrow = open_pipeline(
        checkpoint, deterministic=True, kv_cache_block_size=16, max_batch_input_tokens=16, max_batch_size=2
    )

    def contexts() -> list[TextContext]:
        return [context_of(PROMPT[:n], 20, request_id=str(n)) for n in (6, 5)]

    plain = outcome(narrow, contexts())
    narrow.proposer = oracle = Oracle(texts_of(plain), MISTAKES["always right"], 30)
    assert outcome(narrow, contexts()) == plain
    assert len(oracle.seen[0][0]) == (16 - 11) // 2
    assert len(oracle.seen[2][0]) == (16 - 2) // 2
