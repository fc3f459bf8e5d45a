"""Sampled tokens, compared with an implementation in numpy; random numbers and inputs of `Sampler`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_draws import num_examples

from penstock.kernels import Ops, SamplingInputs
from penstock.kernels.cpu import load as load_compiled
from penstock.kernels.reference import ReferenceOps
from penstock.pipelines.core import SamplingParams
from penstock.pipelines.sampling import Sampler, splitmix64, uniforms

GREEDY = SamplingParams()


@pytest.fixture(scope="module", params=["reference", "compiled"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return ReferenceOps()
    compiled_back_end = load_compiled()
    if compiled_back_end is None:
        pytest.skip("the C++ kernels are not built")
    return compiled_back_end


def kept_tokens(logits: np.ndarray, params: SamplingParams) -> tuple[list[int], np.ndarray]:
    """Return the sorted token ids that the rule of `Ops.sample` keeps, and their cumulative probabilities."""
    if params.temperature == 0 or params.top_k == 1:
        return [int(logits.argmax())], np.ones(1)
    scores = logits.astype(np.float64) / np.float64(np.float32(params.temperature))
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    order = sorted(range(len(logits)), key=lambda token: (-probabilities[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    mass = sum(probabilities[token] for token in order)
    kept_ids, total = [], 0.0
    for token in order:
        if total < float(np.float32(params.top_p)) * mass or params.top_p >= 1 or not kept_ids:
            kept_ids.append(token)
        total += probabilities[token]
    floor = float(np.float32(params.min_p)) * probabilities[kept_ids[0]]
    kept_ids = sorted(token for token in kept_ids if probabilities[token] >= floor)
    return kept_ids, np.cumsum([probabilities[token] for token in kept_ids])


def expected_tokens(logits: np.ndarray, params: SamplingParams, random_numbers: np.ndarray) -> np.ndarray:
    """Return the sampled token for each random number u.

    It is the first kept token whose cumulative probability exceeds u times the total.
    """
    kept_ids, sums = kept_tokens(logits, params)
    positions = np.searchsorted(sums, random_numbers * sums[-1], side="right")
    return np.array(kept_ids)[np.minimum(positions, len(kept_ids) - 1)]


def sample(ops: Ops, logits: np.ndarray, params: list[SamplingParams], positions: list[int]) -> list[int]:
    sampler = Sampler.for_batch(params, torch.device("cpu"))
    rows = np.arange(len(params))
    tokens = sampler(ops, torch.from_numpy(logits), rows, np.array(positions))
    return [int(token) for token in tokens]


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=num_examples(60))
@given(
    rows=st.lists(st.tuples(params_strategy, st.integers(0, 10**6)), min_size=1, max_size=6),
    vocab_size=st.sampled_from([2, 33, 130, 1000]),
    standard_deviation=st.sampled_from([0.1, 1.0, 6.0]),
    seed=st.integers(0, 1000),
)
def test_sampled_tokens_equal_those_of_the_numpy_implementation(
    ops: Ops, rows: list[tuple[SamplingParams, int]], vocab_size: int, standard_deviation: float, seed: int
) -> None:
    logits = (
        np.random.default_rng(seed).normal(0, standard_deviation, (len(rows), vocab_size)).astype(np.float32)
    )
    params = [sampling for sampling, _ in rows]
    positions = [position for _, position in rows]
    expected = [
        int(
            expected_tokens(
                row, sampling, uniforms(np.array([sampling.seed], np.uint64), np.array([position]))
            )[0]
        )
        for row, (sampling, position) in zip(logits, rows, strict=True)
    ]
    assert sample(ops, logits, params, positions) == expected


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.0, top_k=-1)])
def test_greedy_takes_the_smallest_id_on_a_tie(ops: Ops, params: SamplingParams) -> None:
    logits = np.zeros((2, 50), np.float32)
    logits[0, [7, 30]] = 3.0
    assert sample(ops, logits, [params, params], [0, 1]) == [7, 0]


def test_top_k_keeps_the_smallest_ids_on_a_tie(ops: Ops) -> None:
    params = SamplingParams(top_k=3, temperature=1.0)
    logits = np.zeros((200, 40), np.float32)
    sampled_ids = sample(ops, logits, [params] * 200, list(range(200)))
    assert set(sampled_ids) == {0, 1, 2}


@pytest.mark.parametrize(
    ("top_p", "num_kept"), [(0.0, 1), (0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (1.0, 4)]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_the_probability(
    ops: Ops, top_p: float, num_kept: int
) -> None:
    """The four tokens are equally likely, so their cumulative probabilities are exact in floating point."""
    params = SamplingParams(top_k=-1, temperature=1.0, top_p=top_p)
    sampled_ids = sample(ops, np.zeros((200, 4), np.float32), [params] * 200, list(range(200)))
    assert set(sampled_ids) == set(range(num_kept))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=-1),
        SamplingParams(temperature=0.6, top_k=12),
        SamplingParams(temperature=1.3, top_k=-1, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.95, min_p=0.1),
    ],
)
def test_sampled_tokens_have_the_expected_distribution(ops: Ops, params: SamplingParams) -> None:
    """A chi-squared test of 20,000 samples against the probabilities (p > 0.001)."""
    count, vocab_size = 20_000, 50
    logits = np.random.default_rng(5).normal(0, 1.5, vocab_size).astype(np.float32)
    uniform_grid = (np.arange(40_000) + 0.5) / 40_000
    expected = np.bincount(expected_tokens(logits, params, uniform_grid), minlength=vocab_size)
    sampled_ids = sample(ops, np.tile(logits, (count, 1)), [params] * count, list(range(count)))
    observed = np.bincount(sampled_ids, minlength=vocab_size)
    assert not observed[expected == 0].any()
    cells = expected * (count / 40_000) >= 5
    statistic = (((observed - expected / 2) ** 2)[cells] / (expected / 2)[cells]).sum()
    degrees_of_freedom = int(cells.sum()) - 1
    assert statistic < degrees_of_freedom + 3.1 * np.sqrt(2 * degrees_of_freedom) + 6


def test_a_bitmask_excludes_tokens(ops: Ops) -> None:
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(0))
    bitmask = torch.zeros(3, 3, dtype=torch.int32)
    bitmask[0, 2] = 1 << 5  # allows only token 69
    bitmask[1] = -1
    bitmask[2, 0] = torch.tensor(-(2**31))  # the sign bit allows only token 31
    ones = torch.ones(3)
    inputs = SamplingInputs(
        ones,
        torch.zeros(3, dtype=torch.int64),
        ones,
        0 * ones,
        torch.full((3,), 0.4, dtype=torch.float64),
    )
    tokens = ops.sample(logits, inputs, bitmask).tolist()
    assert (tokens[0], tokens[2]) == (69, 31)
    assert tokens[1] == ops.sample(logits, inputs).tolist()[1]


def test_splitmix64_and_uniforms_give_the_published_numbers() -> None:
    """`splitmix64` gives the published numbers, and `uniforms` divides their upper 53 bits by 2**53."""
    published_numbers = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, position) for position in range(4)] == published_numbers
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF
    random_numbers = uniforms(np.full(4, 1234567, np.uint64), np.arange(4))
    assert random_numbers.tolist() == [(output >> 11) / 2**53 for output in published_numbers]
    assert splitmix64(-1, 0) == splitmix64(2**64 - 1, 0)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_uniforms_are_at_least_zero_and_below_one(seed: int, position: int) -> None:
    (number,) = uniforms(np.array([seed], np.uint64), np.array([position]))
    assert 0 <= number < 1


@pytest.mark.parametrize(
    ("params", "has_top_k_or_top_p"),
    [
        ([GREEDY, SamplingParams(temperature=0, top_k=5, top_p=0.5)], False),
        ([GREEDY, SamplingParams(temperature=1, top_k=1, top_p=0.5)], False),
        ([SamplingParams(temperature=1, top_k=-1, top_p=1, min_p=0.1)], False),
        ([GREEDY, SamplingParams(temperature=1, top_k=-1, top_p=0.5)], True),
        ([GREEDY, SamplingParams(temperature=1, top_k=5)], True),
    ],
)
def test_sampling_inputs_state_whether_top_k_or_top_p_limits_a_row(
    params: list[SamplingParams], has_top_k_or_top_p: bool
) -> None:
    inputs = Sampler.for_batch(params, torch.device("cpu")).inputs
    assert inputs.has_top_k_or_top_p == has_top_k_or_top_p
    assert inputs.take(torch.tensor([0, 0])).has_top_k_or_top_p == has_top_k_or_top_p
