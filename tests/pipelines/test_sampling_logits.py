"""Effects of sampling parameters on logits and sampled tokens, token counts, and refused parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipeline_steps import make_context, open_pipeline
from support.random_draws import num_examples
from support.tiny_llm import VOCABULARY, write_tiny_llm

from penstock.errors import InputError
from penstock.kernels import Ops
from penstock.kernels.cpu import load as load_compiled
from penstock.kernels.reference import ReferenceOps
from penstock.pipelines.core import SamplingParams, TextContext, msgpack_numpy_decoder, msgpack_numpy_encoder
from penstock.pipelines.sampling import Sampler, adjust_logits, check_logit_rules

VOCAB_SIZE = 20
END_TOKENS = {3, 7}


def adjust(
    logits: torch.Tensor,  # [R, V]
    contexts: list[TextContext],
    drafts: list[list[int]] | None = None,
) -> torch.Tensor:
    """Return the adjusted logits ``[R, V]``: a row for each context and for each of its draft tokens."""
    counts = [1 + len(draft) for draft in drafts or [[]] * len(contexts)]
    sequences = np.arange(len(contexts)).repeat(counts)
    positions = [c.active_idx + j for c, count in zip(contexts, counts, strict=True) for j in range(count)]
    return adjust_logits(logits, contexts, sequences, np.array(positions), drafts)


def random_logits(rows: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def advance(context: TextContext, tokens: list[int]) -> TextContext:
    for token in tokens:
        context.update(token)
    return context


def expected_row(logits: np.ndarray, context: TextContext, drafts: list[int]) -> tuple[np.ndarray, set[int]]:
    """Return the adjusted logits ``[V]`` and the forbidden tokens, computed from the definition."""
    params, scores = context.sampling_params, logits.astype(np.float64).copy()
    generated = context.generated_tokens.tolist() + drafts
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    if params.repetition_penalty != 1:
        for token in {*context.prompt_tokens.tolist(), *generated}:
            scores[token] *= params.repetition_penalty ** (-1 if scores[token] > 0 else 1)
    for token in set(generated):
        scores[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    forbidden_ids = set(params.banned_token_ids or [])
    for *prefix, last_token in params.banned_sequences or []:
        if generated[len(generated) - len(prefix) :] == prefix:
            forbidden_ids.add(last_token)
    if params.allowed_token_ids is not None:
        forbidden_ids |= set(range(VOCAB_SIZE)) - set(params.allowed_token_ids)
    if len(generated) < params.min_new_tokens:
        forbidden_ids |= context.eos_token_ids
    return scores, forbidden_ids


def assert_equals_definition(result: torch.Tensor, logits_before: torch.Tensor, rows: list[Any]) -> None:
    for row, plain_row, (context, drafts) in zip(result.numpy(), logits_before.numpy(), rows, strict=True):
        scores, forbidden_ids = expected_row(plain_row, context, drafts)
        remaining_ids = sorted(set(range(VOCAB_SIZE)) - forbidden_ids)
        np.testing.assert_allclose(row[remaining_ids], scores[remaining_ids], rtol=1e-5, atol=1e-5)
        assert (row[sorted(forbidden_ids)] <= -1e20).all()


token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)
params_strategy = st.builds(
    SamplingParams,
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    min_new_tokens=st.sampled_from([0, 0, 3]),
    logit_bias=st.none()
    | st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100, width=32), max_size=4),
    allowed_token_ids=st.none() | st.lists(st.integers(8, 12), min_size=1, max_size=5),
    banned_token_ids=st.none() | st.lists(st.integers(13, 17), max_size=5),
    banned_sequences=st.none() | st.lists(st.lists(st.integers(13, 17), min_size=1, max_size=3), max_size=9),
)


@settings(max_examples=num_examples(150))
@given(
    rows=st.lists(st.tuples(params_strategy, token_lists, token_lists), min_size=1, max_size=4),
    draft_lists=st.lists(token_lists, min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_adjusted_logits_of_any_batch_equal_the_definition(
    rows: list[tuple[SamplingParams, list[int], list[int]]], draft_lists: list[list[int]], seed: int
) -> None:
    contexts = [
        advance(make_context([1, *prompt], sampling_params=params, eos_token_ids=set()), generated)
        for params, prompt, generated in rows
    ]
    for context in contexts:
        context.eos_token_ids |= END_TOKENS
    drafts = draft_lists[: len(contexts)]
    contexts_and_drafts = [
        (c, d[:j]) for c, d in zip(contexts, drafts, strict=True) for j in range(len(d) + 1)
    ]
    logits = random_logits(len(contexts_and_drafts), seed)
    logits_before = logits.clone()
    assert_equals_definition(adjust(logits, contexts, drafts), logits_before, contexts_and_drafts)
    assert torch.equal(logits, logits_before), "the input is not modified"


def test_a_banned_sequence_is_completed_only_if_no_other_token_remains() -> None:
    params = SamplingParams(banned_sequences=[[5, 6, 7], [6, 8], [9]], allowed_token_ids=[5, 6, 7, 8, 9])
    context = advance(make_context([5], sampling_params=params, eos_token_ids=set()), [5])
    result = adjust(random_logits(3, 0), [context], [[6, 5]])
    banned_ids = [{token for token in range(5, 10) if row[token] <= -1e20} for row in result.tolist()]
    assert banned_ids == [
        {9},
        {7, 8, 9},
        {9},
    ]  # after the outputs [5], [5, 6] and [5, 6, 5], without the prompt
    strict_params = SamplingParams(banned_sequences=[[5, 6]], allowed_token_ids=[6])
    context = advance(make_context([1], sampling_params=strict_params, eos_token_ids=set()), [5])
    assert adjust(random_logits(1, 0), [context], None)[0].argmax() == 6


def test_adjusted_logits_equal_transformers() -> None:
    from transformers import (
        LogitsProcessorList,
        MinNewTokensLengthLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        SuppressTokensLogitsProcessor,
    )

    bias = {4: -2.5, 9: 6.0, 15: 1.0}
    allowed = [3, 4, 9, 11, 15]
    params = SamplingParams(
        repetition_penalty=1.7,
        logit_bias=bias,
        min_new_tokens=4,
        allowed_token_ids=allowed,
        banned_token_ids=[15],
    )
    context = make_context([3, 4, 4, 9], sampling_params=params, eos_token_ids={3})
    advance(context, [11, 9])
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            RepetitionPenaltyLogitsProcessor(1.7),
            MinNewTokensLengthLogitsProcessor(4, 4, [3], device="cpu"),
            PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1),
            SuppressTokensLogitsProcessor([15]),
        ]
    )
    for seed in range(5):
        logits = random_logits(seed=seed)
        expected = processors(torch.from_numpy(context.all_tokens)[None], logits.clone())
        result = adjust(logits, [context])
        assert (result.argmax(), result.argmin().item()) == (expected.argmax(), 0)
        is_finite = expected.isfinite()
        torch.testing.assert_close(result[is_finite], expected[is_finite])
        assert (result[~is_finite] <= -1e20).all()


def test_frequency_and_presence_penalties_count_only_the_output() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    penalized_context, plain_context = make_context([1, 2, 2], sampling_params=params), make_context([1])
    advance(penalized_context, [5, 5, 6])
    result = adjust(torch.zeros(2, 8), [penalized_context, plain_context])
    assert result.tolist() == [[0, 0, 0, 0, 0, -1.25, -0.75, 0], [0] * 8]


def test_rows_without_adjustments_are_not_copied() -> None:
    logits, contexts = random_logits(2), [make_context([1]), make_context([2])]
    assert adjust(logits, contexts) is logits
    assert all(not context.__dict__ for context in contexts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_adjusted_in_float32(dtype: torch.dtype) -> None:
    context = make_context([1], sampling_params=SamplingParams(logit_bias={2: 0.001}))
    result = adjust(torch.full((1, VOCAB_SIZE), 8.0, dtype=dtype), [context])
    assert result.dtype == torch.float32
    assert result[0, 2].item() == pytest.approx(8.001, abs=1e-6)


def test_min_new_tokens_masks_the_end_tokens_until_it_is_reached() -> None:
    params = SamplingParams(min_new_tokens=2)
    context = make_context([1, 2], sampling_params=params, eos_token_ids={3, 0})
    for position, masked in ((2, {0, 3}), (3, {0, 3}), (4, set())):
        result = adjust_logits(torch.zeros(1, 5), [context], np.array([0]), np.array([position]))
        assert set(np.flatnonzero(result[0].numpy() < 0)) == masked


def test_an_end_token_beyond_the_vocabulary_needs_no_mask() -> None:
    context = make_context(
        [1, 2], sampling_params=SamplingParams(min_new_tokens=2), eos_token_ids={-1, 3, 5, 9000}
    )
    result = adjust_logits(torch.zeros(1, 5), [context], np.array([0]), np.array([2]))
    assert np.flatnonzero(result[0].numpy() < 0).tolist() == [3]


def test_a_prompt_token_beyond_the_vocabulary_is_not_penalized() -> None:
    context = make_context([1, 30], sampling_params=SamplingParams(repetition_penalty=2.0))
    result = adjust(torch.ones(2, VOCAB_SIZE), [context, make_context([1])])
    assert result.sum(1).tolist() == [VOCAB_SIZE - 0.5, VOCAB_SIZE]


@pytest.mark.parametrize("penalty", [1e300, 5e-324, 1e-9])
def test_an_extreme_repetition_penalty_gives_finite_logits(penalty: float) -> None:
    context = make_context([0, 1, 2], sampling_params=SamplingParams(repetition_penalty=penalty))
    logits = torch.tensor([[0.0, 5.0, -5.0, 1.0]])
    result = adjust(logits, [context])
    assert result.isfinite().all()
    assert (result.abs() <= 1e15).all()


# Token counts after changes of the tokens.


def token_counts(context: TextContext) -> dict[int, float]:
    counts = context.token_counts
    return {t: n for t, n in zip(counts.ids.tolist(), counts.counts.tolist(), strict=True) if n}


def recount(context: TextContext) -> dict[int, float]:
    tokens = context.generated_tokens.tolist()
    return {token: tokens.count(token) for token in tokens}


operations = st.lists(
    st.tuples(
        st.sampled_from(["update", "update", "jump", "roll", "reset", "look", "cut"]), st.integers(0, 5)
    ),
    max_size=40,
)


@settings(max_examples=num_examples(200))
@given(operations=operations, with_prompt=st.booleans())
def test_token_counts_equal_a_recount(operations: list[tuple[str, int]], with_prompt: bool) -> None:
    params = SamplingParams(repetition_penalty=1.5 if with_prompt else 1.0, presence_penalty=1.0)
    context = make_context([4, 5, 5], max_new_tokens=500, sampling_params=params)
    for operation, number in operations:
        if operation == "update":
            context.update(number)
        elif operation == "jump":
            context.jump_ahead(number)
        elif operation == "roll":
            context.rollback(min(number, len(context.generated_tokens)))
        elif operation == "reset":
            context.reset()
        elif operation == "cut":  # `set_token_indices` does not update the token counts
            new_end = max(context.end_idx - number, 4)
            if context.start_idx < new_end - 1 < context.end_idx and len(context.generated_tokens):
                context.set_token_indices(active_idx=new_end, end_idx=new_end)
        else:
            assert token_counts(context) == recount(context)
    assert token_counts(context) == recount(context)
    assert set(context.token_counts.ids.tolist()) == {
        *context.generated_tokens.tolist(),
        *([4, 5] if with_prompt else []),
    }


def test_new_tokens_are_counted_incrementally() -> None:
    context = make_context([1], max_new_tokens=2000, sampling_params=SamplingParams(presence_penalty=1.0))
    counts = context.token_counts
    for token in np.random.default_rng(0).integers(0, 900, 1500).tolist():
        context.update(token)
    assert context.token_counts is counts, "the object is updated instead of computed again"
    assert token_counts(context) == recount(context)


def test_sampling_rules_of_a_context_are_serialized() -> None:
    params = SamplingParams(logit_bias={3: 5, 4: -0.5}, allowed_token_ids=[3, 4], banned_token_ids=[4])
    context = advance(make_context([1, 2], sampling_params=params), [3])
    assert context.logit_rules is not None
    decoded_context = msgpack_numpy_decoder(TextContext)(msgpack_numpy_encoder()(context))
    assert decoded_context == context
    logits = random_logits()
    assert torch.equal(adjust(logits, [decoded_context]), adjust(logits, [context]))


# Ids beyond the vocabulary, and rows in which no token remains.


@pytest.mark.parametrize(
    "rules", [{"logit_bias": {20: 1.0}}, {"allowed_token_ids": [2, 20]}, {"banned_token_ids": [20]}]
)
def test_the_error_names_a_token_beyond_the_vocabulary(rules: dict[str, Any]) -> None:
    context = make_context([1], sampling_params=SamplingParams(**rules))
    check_logit_rules(context, 21)
    for refuse in (
        lambda: check_logit_rules(context, VOCAB_SIZE),
        lambda: adjust(random_logits(), [context]),
    ):
        with pytest.raises(InputError, match="has 20: ids are integers from 0 to 19"):
            refuse()


def test_a_batch_with_a_token_beyond_the_vocabulary_is_refused_unchanged(tmp_path: Path) -> None:
    pipeline = open_pipeline(write_tiny_llm(tmp_path))
    for _ in range(2):  # once before and once after the vocabulary size is known
        invalid_context = make_context([1, 2], sampling_params=SamplingParams(banned_token_ids=[VOCABULARY]))
        with pytest.raises(InputError, match=f"has {VOCABULARY}: ids are integers from 0 to"):
            pipeline.execute({invalid_context.request_id: invalid_context})
        assert (invalid_context.start_idx, invalid_context.current_length) == (0, 2)
        pipeline.release(invalid_context)
    assert pipeline.kv.num_free_blocks == pipeline.kv.num_blocks


def test_min_new_tokens_is_refused_if_all_allowed_tokens_are_end_tokens() -> None:
    params = SamplingParams(min_new_tokens=1, allowed_token_ids=[3, 7])
    with pytest.raises(InputError, match="min_new_tokens is 1, but each of the 2 tokens"):
        make_context([1], sampling_params=params, eos_token_ids={3, 7, 9})
    make_context([1], sampling_params=params, eos_token_ids={3})


@pytest.fixture(scope="module", params=["reference", "compiled"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return ReferenceOps()
    compiled_back_end = load_compiled()
    if compiled_back_end is None:
        pytest.skip("the C++ kernels are not built")
    return compiled_back_end


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1.0, 2.0])
@pytest.mark.parametrize(
    ("params", "allowed_by_grammar", "expected"),
    [
        ({"banned_token_ids": [4, 5]}, [4], 4),  # the grammar has precedence over banned tokens
        ({"min_new_tokens": 5}, [3], 3),  # the grammar has precedence over min_new_tokens
        (
            {"min_new_tokens": 5, "banned_token_ids": [4]},
            [4, 3],
            3,  # banned_token_ids has precedence over min_new_tokens
        ),
        ({"min_new_tokens": 5, "banned_token_ids": [4, 3]}, [4, 3, 6], 6),
        ({"allowed_token_ids": [4, 6]}, [4, 5], 4),
        ({"min_new_tokens": 5, "banned_token_ids": [t for t in range(VOCAB_SIZE) if t != 3]}, None, 3),
    ],
)
def test_rules_of_lower_precedence_are_dropped_if_no_token_remains(
    ops: Ops,
    temperature: float,
    params: dict[str, Any],
    allowed_by_grammar: list[int] | None,
    expected: int,
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=-1, **params)
    context = make_context([1], sampling_params=sampling, eos_token_ids={3})
    bitmask = None
    if allowed_by_grammar is not None:
        bitmask = torch.tensor([[sum(1 << token for token in allowed_by_grammar)]], dtype=torch.int32)
    sampler = Sampler.for_batch([sampling], torch.device("cpu"))
    for seed in range(20):
        logits = adjust(random_logits(seed=seed), [context])
        token = sampler(ops, logits, np.array([0]), np.array([seed]), bitmask)
        assert token.tolist() == [expected]


def test_a_banned_end_token_is_treated_like_other_banned_tokens() -> None:
    params = SamplingParams(min_new_tokens=5, banned_token_ids=[3, 4])
    result = adjust(random_logits(), [make_context([1], sampling_params=params, eos_token_ids={3, 5})])
    assert result[0, 3] == result[0, 4] < result[0, 5] < -1e15


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=-1, temperature=1.0, banned_token_ids=[0, 3], logit_bias={5: 2.0, 6: -3.0}),
        SamplingParams(top_k=3, temperature=0.8, allowed_token_ids=[1, 2, 3, 4, 9], frequency_penalty=1.0),
        SamplingParams(top_k=-1, top_p=0.9, temperature=1.3, repetition_penalty=1.4, min_new_tokens=9),
        SamplingParams(top_k=-1, min_p=0.2, temperature=1.1, presence_penalty=-1.2, logit_bias={2: 1.5}),
    ],
)
def test_sampled_tokens_have_the_expected_distribution(ops: Ops, params: SamplingParams) -> None:
    """A chi-squared test of 20,000 samples against the probabilities (p > 0.001)."""
    count = 20_000
    context = advance(make_context([2, 4], sampling_params=params, eos_token_ids=set(END_TOKENS)), [9, 9, 2])
    logits = random_logits(seed=3) / 3
    scores, forbidden_ids = expected_row(logits[0].numpy(), context, [])
    scores[sorted(forbidden_ids)] = -np.inf
    probabilities = _probabilities(scores, params)
    rows = adjust(logits, [context]).expand(count, VOCAB_SIZE).contiguous()
    sampler = Sampler.for_batch([params], torch.device("cpu"))
    sampled_ids = sampler(ops, rows, np.zeros(count, np.int64), np.arange(count))
    observed = np.bincount(sampled_ids.numpy(), minlength=VOCAB_SIZE)
    assert not observed[probabilities == 0].any()
    cells = probabilities * count >= 5
    statistic = ((observed - probabilities * count) ** 2 / (probabilities * count + 1e-9))[cells].sum()
    degrees_of_freedom = int(cells.sum()) - 1
    assert degrees_of_freedom > 0
    assert statistic < degrees_of_freedom + 3.1 * np.sqrt(2 * degrees_of_freedom) + 6


def _probabilities(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    weights = np.exp((scores - scores.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    kept_ids = order[: params.top_k] if params.top_k > 0 else order
    total = weights[kept_ids].sum()
    sums_before = np.cumsum(weights[kept_ids]) - weights[kept_ids]
    kept_ids = kept_ids[(sums_before < params.top_p * total) | (params.top_p >= 1)]
    kept_ids = kept_ids[weights[kept_ids] >= params.min_p * weights.max()]
    result = np.zeros_like(weights)
    result[kept_ids] = weights[kept_ids] / weights[kept_ids].sum()
    return result
