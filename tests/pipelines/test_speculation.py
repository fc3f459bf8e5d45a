"""Speculation does not change the output: proposers compared with plain decoding in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import write_checkpoint
from support.pipeline_steps import generate_tokens, make_context, open_pipeline
from support.speculation import (
    PROMPT,
    REPETITIVE_PROMPT,
    VOCABULARY,
    OracleProposer,
    mixed_contexts,
    output_tokens,
    run_directly,
    run_scheduled,
)

from penstock.architectures.llama import tiny_config
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import SamplingParams, TextContext, TextGenerationStatus
from penstock.pipelines.speculative import AdaptiveDraftLength, FixedDraftLength, NGramProposer

pytestmark = pytest.mark.models

BLOCK_BYTES = 4 * 2 * 3 * 2 * 8 * 16  # float32 * K and V * layers * kv heads * head dim * tokens per block


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), tiny_config())


@pytest.fixture
def pipeline(checkpoint: Path) -> TextGenerationPipeline:
    return open_pipeline(checkpoint, deterministic=True, kv_cache_block_size=16)


WRONG_DRAFTS: dict[str, Callable[[int], bool]] = {
    "all drafts right": lambda position: False,
    "all drafts wrong": lambda position: True,
    "every third draft wrong": lambda position: position % 3 == 2,
    "five wrong, five right": lambda position: position // 5 % 2 == 0,
}


@pytest.mark.parametrize("draft_pattern", WRONG_DRAFTS)
def test_a_mixed_batch_with_drafts_gives_the_output_of_plain_decoding(
    pipeline: TextGenerationPipeline, draft_pattern: str
) -> None:
    plain_results = run_directly(pipeline, mixed_contexts())
    pipeline.proposer = proposer = OracleProposer(
        output_tokens(plain_results), WRONG_DRAFTS[draft_pattern], 5
    )
    assert run_directly(pipeline, mixed_contexts(), num_steps=4) == plain_results
    assert sorted(proposer.released) == sorted(plain_results)
    stats = pipeline.speculation_stats
    assert stats.num_proposed == sum(len(draft) for draft, _ in proposer.observed)
    assert stats.num_accepted == sum(accepted for _, accepted in proposer.observed)
    assert stats.num_verified_steps == sum(bool(draft) for draft, _ in proposer.observed)
    assert stats.acceptance_rate == {"all drafts right": 1, "all drafts wrong": 0}.get(
        draft_pattern, pytest.approx(stats.num_accepted / stats.num_proposed)
    )
    if draft_pattern == "all drafts right":
        assert stats.mean_tokens > 4


def test_accepted_tokens_have_their_log_probabilities(
    pipeline: TextGenerationPipeline,
) -> None:
    def scored_context() -> TextContext:
        return make_context(PROMPT, 6, request_id="a", log_probabilities=2)

    plain_results = run_directly(pipeline, [scored_context()])
    pipeline.proposer = OracleProposer(output_tokens(plain_results), WRONG_DRAFTS["all drafts right"], 9)
    tokens = pipeline.execute({"a": scored_context()})["a"].tokens
    assert [(token.next_token, token.log_probabilities) for token in tokens] == plain_results["a"][:-1]
    assert all(len(token.log_probabilities.token_log_probabilities) == 1 for token in tokens)


@pytest.mark.parametrize("min_length", [1, 2])
@pytest.mark.parametrize(
    "draft_lengths", [None, FixedDraftLength(3), AdaptiveDraftLength(6)], ids=["free", "fixed", "adaptive"]
)
def test_drafts_of_the_n_gram_proposer_give_the_output_of_plain_decoding(
    pipeline: TextGenerationPipeline, min_length: int, draft_lengths: Any
) -> None:
    plain_results = run_directly(pipeline, mixed_contexts())
    pipeline.proposer, pipeline.draft_lengths = NGramProposer(min_length, 3), draft_lengths
    assert run_directly(pipeline, mixed_contexts()) == plain_results
    assert pipeline.speculation_stats.num_proposed > (
        0 if isinstance(draft_lengths, AdaptiveDraftLength) else 10
    )


@pytest.mark.parametrize("seed", range(4))
def test_sampling_with_drafts_gives_the_output_of_plain_decoding(
    pipeline: TextGenerationPipeline, seed: int
) -> None:
    def contexts() -> list[TextContext]:
        sampling = SamplingParams(temperature=1.0, top_k=(-1, 20)[seed % 2], top_p=0.9, seed=seed)
        prompts = (PROMPT, REPETITIVE_PROMPT, PROMPT[:3])
        return [
            make_context(p, 30, request_id=str(i), sampling_params=sampling) for i, p in enumerate(prompts)
        ]

    plain_results = run_directly(pipeline, contexts())
    pipeline.proposer = OracleProposer(
        output_tokens(plain_results), lambda position: (position * 7 + seed) % 4 == 0, 4
    )
    assert run_directly(pipeline, contexts()) == plain_results


@pytest.mark.parametrize("proposer", ["oracle", "ngram"])
def test_chunked_prompts_with_drafts_give_the_output_of_plain_decoding(
    pipeline: TextGenerationPipeline, proposer: str
) -> None:
    plain_results = run_directly(pipeline, mixed_contexts())
    oracle = OracleProposer(output_tokens(plain_results), WRONG_DRAFTS["every third draft wrong"], 4)
    pipeline.proposer = oracle if proposer == "oracle" else NGramProposer(1, 3)
    limits = {"max_batch_size": 8, "max_batch_input_tokens": 13, "min_chunk_size": 3}
    actual, _ = run_scheduled(pipeline, mixed_contexts(), **limits)
    assert actual == plain_results
    assert pipeline.speculation_stats.num_accepted


@pytest.mark.parametrize("proposer", ["oracle", "ngram"])
def test_preempted_contexts_with_drafts_give_the_output_of_plain_decoding(
    checkpoint: Path, pipeline: TextGenerationPipeline, proposer: str
) -> None:
    plain_results = run_directly(pipeline, mixed_contexts())
    small_pipeline = open_pipeline(
        checkpoint,
        deterministic=True,
        kv_cache_block_size=16,
        max_length=80,
        max_batch_size=6,
        kv_cache_memory=BLOCK_BYTES * 13,
    )
    oracle = OracleProposer(output_tokens(plain_results), WRONG_DRAFTS["every third draft wrong"], 4)
    small_pipeline.proposer = oracle if proposer == "oracle" else NGramProposer(1, 3)
    if proposer == "ngram":  # the vocabulary size is known after a forward; before, all drafts are dropped
        run_directly(small_pipeline, [make_context(PROMPT[:3], 1)])
    actual, scheduler = run_scheduled(
        small_pipeline, mixed_contexts(), max_batch_size=6, max_batch_input_tokens=40
    )
    assert scheduler.num_preemptions
    assert actual == plain_results
    assert small_pipeline.speculation_stats.num_accepted


def test_prefix_hits_with_drafts_give_the_output_of_plain_decoding(pipeline: TextGenerationPipeline) -> None:
    long_prompt = [*PROMPT, *PROMPT[:15]]
    plain_results = run_directly(pipeline, [make_context(long_prompt, 30, request_id="a")])
    pipeline.proposer = OracleProposer(
        output_tokens(plain_results), WRONG_DRAFTS["every third draft wrong"], 4
    )
    context = make_context(long_prompt, 30, request_id="a")
    assert run_directly(pipeline, [context]) == plain_results
    assert context.num_cached_tokens == 32
    continued_prompt = [*long_prompt, *output_tokens(plain_results)["a"][:20]]
    context = make_context(continued_prompt, 10, request_id="a")
    pipeline.proposer = None
    assert output_tokens(run_directly(pipeline, [context]))["a"] == output_tokens(plain_results)["a"][20:]
    assert context.num_cached_tokens == 64, "blocks are registered with accepted tokens only"


@pytest.mark.parametrize("end_position", [0, 1, 3, 4])
def test_an_end_token_among_the_drafts_ends_the_output(
    pipeline: TextGenerationPipeline, end_position: int
) -> None:
    (plain_tokens,) = generate_tokens(
        pipeline, [make_context(PROMPT, 30, sampling_params=SamplingParams(temperature=1, seed=1))]
    )
    assert plain_tokens[end_position] not in plain_tokens[:end_position]

    def context() -> TextContext:
        return TextContext(
            prompt="",
            max_length=60,
            tokens=np.array(PROMPT),
            eos_token_ids={plain_tokens[end_position]},
            request_id="a",
            sampling_params=SamplingParams(temperature=1, seed=1),
        )

    plain_results = run_directly(pipeline, [context()])
    assert plain_results["a"][-1] is TextGenerationStatus.END_OF_SEQUENCE
    pipeline.proposer = OracleProposer({"a": plain_tokens}, WRONG_DRAFTS["all drafts right"], 4)
    assert run_directly(pipeline, [context()]) == plain_results


def test_an_end_sequence_among_the_drafts_ends_the_output(pipeline: TextGenerationPipeline) -> None:
    (plain_tokens,) = generate_tokens(pipeline, [make_context(PROMPT, 30)])

    def context() -> TextContext:
        return TextContext(
            prompt="",
            max_length=60,
            tokens=np.array(PROMPT),
            eos_sequences=[plain_tokens[3:6]],
            request_id="a",
        )

    plain_results = run_directly(pipeline, [context()])
    pipeline.proposer = OracleProposer({"a": plain_tokens}, WRONG_DRAFTS["all drafts right"], 9)
    assert run_directly(pipeline, [context()]) == plain_results
    assert output_tokens(plain_results)["a"] == plain_tokens[:5]


def test_min_new_tokens_delays_drafted_end_tokens(pipeline: TextGenerationPipeline) -> None:
    (plain_tokens,) = generate_tokens(pipeline, [make_context(PROMPT, 30)])

    def context() -> TextContext:
        return TextContext(
            prompt="",
            max_length=60,
            tokens=np.array(PROMPT),
            eos_token_ids=set(plain_tokens),
            request_id="a",
            sampling_params=SamplingParams(min_new_tokens=7),
        )

    plain_results = run_directly(pipeline, [context()])
    for drafts in (plain_tokens, output_tokens(plain_results)["a"]):
        pipeline.proposer = OracleProposer({"a": drafts}, WRONG_DRAFTS["all drafts right"], 5)
        assert run_directly(pipeline, [context()]) == plain_results


class InvalidDraftProposer(OracleProposer):
    """A proposer that inserts an invalid token id after the second draft."""

    def propose(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[list[int]]:
        return [[*draft[:2], invalid_id, *draft[2:]] for draft, invalid_id in zip(
            super().propose(contexts, limits), (-1, VOCABULARY, 10**12), strict=True)]  # fmt: skip


def test_invalid_draft_ids_and_the_drafts_after_them_are_dropped(pipeline: TextGenerationPipeline) -> None:
    def contexts() -> list[TextContext]:
        return [make_context(PROMPT[:n], 20, request_id=str(n)) for n in (5, 6, 7)]

    plain_results = run_directly(pipeline, contexts())
    pipeline.proposer = proposer = InvalidDraftProposer(
        output_tokens(plain_results), WRONG_DRAFTS["all drafts right"], 6
    )
    assert run_directly(pipeline, contexts()) == plain_results
    assert max(len(draft) for draft, _ in proposer.observed) == 2


def test_too_few_blocks_reduce_the_drafts(checkpoint: Path) -> None:
    fixed_settings = {"kv_cache_block_size": 16, "max_length": 64, "max_batch_size": 2, "deterministic": True}
    small_pipeline = open_pipeline(checkpoint, kv_cache_memory=BLOCK_BYTES * 5, **fixed_settings)

    def context(tokens: Sequence[int]) -> TextContext:
        return make_context(tokens, 30, request_id="a")

    plain_results = run_directly(small_pipeline, [context(PROMPT)])
    small_pipeline.proposer = oracle = OracleProposer(
        output_tokens(plain_results) | {"b": [1] * 9}, WRONG_DRAFTS["all drafts right"], 20
    )
    drafting_context, other_context = context(PROMPT), make_context(PROMPT[::-1], 1, request_id="b")
    response = small_pipeline.execute({"a": drafting_context, "b": other_context})
    num_drafted = len(oracle.observed[0][0])
    assert 0 < num_drafted <= 18, (
        "a prompt of 30 tokens leaves 2 slots in two blocks; a third block may not be free"
    )
    assert len(response["a"].tokens) == num_drafted + 1
    small_pipeline.release(other_context)
    small_pipeline.release(drafting_context)
    assert run_directly(small_pipeline, [context(PROMPT)]) == plain_results


def test_a_step_with_drafts_does_not_exceed_the_token_budget(checkpoint: Path) -> None:
    narrow_pipeline = open_pipeline(
        checkpoint, deterministic=True, kv_cache_block_size=16, max_batch_input_tokens=16, max_batch_size=2
    )

    def contexts() -> list[TextContext]:
        return [make_context(PROMPT[:n], 20, request_id=str(n)) for n in (6, 5)]

    plain_results = run_directly(narrow_pipeline, contexts())
    narrow_pipeline.proposer = oracle = OracleProposer(
        output_tokens(plain_results), WRONG_DRAFTS["all drafts right"], 30
    )
    assert run_directly(narrow_pipeline, contexts()) == plain_results
    assert len(oracle.observed[0][0]) == (16 - 11) // 2
    assert len(oracle.observed[2][0]) == (16 - 2) // 2
