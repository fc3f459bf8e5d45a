"""Sampling from large vocabularies: every back end equals the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from support.back_ends import back_end_params, fast_back_ends
from torch import Tensor

from penstock.kernels import Ops, SamplingInputs
from penstock.kernels.reference import ReferenceOps

REFERENCE = ReferenceOps()


@pytest.fixture(params=back_end_params(fast_back_ends()))
def ops(request: pytest.FixtureRequest) -> Ops:
    return fast_back_ends()[request.param]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_rules(
    rows: Sequence[Mapping[str, float]], uniforms: Sequence[float] | None = None
) -> SamplingInputs:
    """Return sampling inputs with the given rules of each row. Uniforms are random if none are given."""
    default_rules = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values = [{**default_rules, **row} for row in rows]
    return SamplingInputs(
        torch.tensor([row["temperature"] for row in values]),
        torch.tensor([int(row["top_k"]) for row in values]),
        torch.tensor([row["top_p"] for row in values]),
        torch.tensor([row["min_p"] for row in values]),
        torch.rand(len(rows), dtype=torch.float64)
        if uniforms is None
        else torch.tensor(uniforms, dtype=torch.float64),
    )


def sample_and_compare(ops: Ops, logits: Tensor, rules: SamplingInputs, mask: Tensor | None = None) -> Tensor:
    """Return the tokens that a back end samples. Check that they equal the tokens of the reference."""
    tokens = ops.sample(logits, rules, mask)
    assert torch.equal(tokens, REFERENCE.sample(logits, rules, mask))
    return tokens


UNIFORMS = (0.0, 0.4, 1 - 2**-53)


@pytest.mark.parametrize("rule", [{"top_k": 3}, {"top_k": 3, "temperature": 0.1}, {"top_p": 1e-6}], ids=str)
def test_equal_logits_of_distant_token_ids_rank_by_token_id(ops: Ops, rule: dict[str, float]) -> None:
    logits = torch.full((3, 5000), -40.0)
    logits[:, [5, 1030, 2050, 4097, 4999]] = 1
    tokens = sample_and_compare(ops, logits, make_rules([rule] * 3, UNIFORMS))
    assert tokens.tolist() == ([5, 1030, 2050] if "top_k" in rule else [5, 5, 5])


def test_greedy_sampling_takes_the_first_of_equal_logits(ops: Ops) -> None:
    logits = torch.zeros(3, 5000)
    logits[1, [4999, 3000]] = 1
    logits[2, [1023, 1024]] = 1
    rule_sets: list[dict[str, float]] = [{"temperature": 0.0}, {"top_k": 1}]
    for rule in rule_sets:
        assert sample_and_compare(ops, logits, make_rules([rule] * 3)).tolist() == [0, 3000, 1023]


@pytest.mark.parametrize("top_k", [30, 2000, 6000, 15_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bfloat16 has many equal logits
def test_small_and_large_top_k_equal_the_reference(ops: Ops, top_k: int, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(3, 20_000)).to(dtype)
    uniforms = (0.0, 0.999, 1 - 2**-53)
    sample_and_compare(ops, logits, make_rules([{"top_k": top_k, "temperature": 9.0}] * 3, uniforms))
    sample_and_compare(
        ops, logits, make_rules([{"top_k": top_k, "top_p": 0.97, "min_p": 0.01, "temperature": 2.0}] * 3)
    )


@pytest.mark.parametrize("rule", [{"top_p": 0.95}, {"top_p": 0.3, "min_p": 0.7}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_of_flat_distributions_equal_the_reference(
    ops: Ops, rule: dict[str, float], dtype: torch.dtype
) -> None:
    logits = torch.randn(3, 20_000).to(dtype)
    for temperature in (1.0, 40.0):
        sample_and_compare(ops, logits, make_rules([rule | {"temperature": temperature}] * 3))


def test_a_mask_of_one_token_selects_it(ops: Ops) -> None:
    rows: list[dict[str, float]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.2},
        {"top_k": 3000},
    ]
    for token in (0, 2047, 2048, 4098):
        mask = torch.zeros(len(rows), 129, dtype=torch.int32)
        mask[:, token // 32] = torch.tensor(1 << token % 32).int()
        logits = torch.randn(len(rows), 4099)
        assert sample_and_compare(ops, logits, make_rules(rows), mask).tolist() == [token] * len(rows)


@pytest.mark.parametrize("vocabulary_size", [1023, 1024, 1025, 4099])
def test_the_last_tokens_of_a_vocabulary_can_be_sampled(ops: Ops, vocabulary_size: int) -> None:
    logits = torch.randn(5, vocabulary_size)
    logits[:, -2:] = 9
    rule_sets: list[dict[str, float]] = [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}]
    for rule in rule_sets:
        tokens = sample_and_compare(ops, logits, make_rules([rule] * 5, (0.0, 0.3, 0.6, 0.9, 1 - 2**-53)))
        if rule:
            assert set(tokens.tolist()) <= {vocabulary_size - 2, vocabulary_size - 1}


@pytest.mark.parametrize("top_p", [0.99, 0.99999, 0.99999994, 0.9999999999999999])
def test_a_top_p_near_1_drops_the_end_of_the_tail(ops: Ops, top_p: float) -> None:
    """The tail has a probability of 0.1 in total. ``top_p`` keeps the first tokens of the tail."""
    logits = torch.zeros(3, 9000)
    logits[:, 3] = torch.tensor(9 * 8999.0).log()
    uniforms = (0.0, 0.95, 1 - 2**-50)
    tokens = sample_and_compare(ops, logits, make_rules([{"top_p": top_p}] * 3, uniforms)).tolist()
    assert tokens[0] == 0
    assert abs(tokens[2] - 8999 * (1 - 10 * (1 - top_p))) < 2


def test_rows_with_different_rules_equal_single_rows(ops: Ops) -> None:
    """Each row of a batch gets the same token as in a batch of one row, and as with the reference."""
    rows: list[dict[str, float]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 1e-6},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 4000},
        {"top_p": 0.9},
        {"top_p": 0.95, "temperature": 30.0},
        {"top_p": 0.0, "temperature": 30.0},
        {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
        {"top_k": 50},
        {"top_p": 0.9},
    ]
    logits = 3 * torch.randn(len(rows), 7001)
    logits[-2, 6000] = torch.nan
    logits[-1] = -torch.inf
    mask = torch.randint(-(2**31), 2**31, (len(rows), 219)).int()
    rules = make_rules(rows)
    for allowed_mask in (None, mask):
        tokens = sample_and_compare(ops, logits, rules, allowed_mask)
        assert tokens[-2:].tolist() == [-1, -1]
        for row in range(len(rows)):
            selected_rows = torch.tensor([row])
            single_tokens = ops.sample(
                logits[selected_rows],
                rules.take(selected_rows),
                None if allowed_mask is None else allowed_mask[selected_rows],
            )
            assert single_tokens[0] == tokens[row]
