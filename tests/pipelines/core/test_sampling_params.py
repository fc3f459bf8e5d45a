"""Which numbers sampling parameters take, and which they refuse by name and value."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.pipelines.core import SamplingParams, msgpack_numpy_decoder, msgpack_numpy_encoder

RANGES = {
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "temperature": (0.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}


@pytest.mark.parametrize(
    "given_",
    [
        *({name: bound} for name, bounds in RANGES.items() for bound in bounds),
        {"temperature": 1, "top_p": 0, "min_p": 1},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 1},
        {"top_k": 1_000_000},
        {"top_k": 40, "min_p": 0.1},
        {"repetition_penalty": 1e-9},
        {"repetition_penalty": 1e300},
        {"max_new_tokens": 0},
        {"max_new_tokens": 5, "min_new_tokens": 9},
        {"seed": 2**64 - 1},
        {"seed": -1},
        {"stop": []},
        {"stop": ["a"], "stop_token_ids": [0, 7]},
        {"logit_bias": {0: -100, 2**40: 100.0}},
        {"logit_bias": {}, "banned_token_ids": []},
        {"allowed_token_ids": [7, 7, 0], "banned_token_ids": [0]},
    ],
)
def test_possible_values_are_kept(given_: dict[str, Any]) -> None:
    params = SamplingParams(**given_)
    assert {name: getattr(params, name) for name in given_} == given_
    assert msgpack_numpy_decoder(SamplingParams)(msgpack_numpy_encoder()(params)) == params


@pytest.mark.parametrize("name", [*RANGES, "repetition_penalty"])
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, True, None, "1", 10**400, np.float64(0.5), np.int64(1)]
)
def test_what_is_no_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name} must be ")
    assert str(caught.value).endswith(f", was {value!r}")


@pytest.mark.parametrize(("name", "bounds"), RANGES.items())
def test_numbers_out_of_range_are_refused(name: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    for value in (math.nextafter(low, -9), math.nextafter(high, 9)):
        given_: dict[str, Any] = {name: value}
        with pytest.raises(InputError, match=rf"{name} must be in \[{low}, {high}\], was {value}"):
            SamplingParams(**given_)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"repetition_penalty": 0}, r"repetition_penalty must be greater than 0.*, was 0"),
        ({"repetition_penalty": -1.0}, r"repetition_penalty must be greater than 0.*, was -1.0"),
        ({"top_k": -2}, r"top_k must be -1 or 0 \(all tokens\) or at least 1, was -2"),
        ({"top_k": 1.0}, r"top_k must be .*, was 1.0"),
        ({"top_k": True}, r"top_k must be .*, was True"),
        ({"top_k": 2**63}, r"top_k must be .*, was 9223372036854775808"),
        ({"max_new_tokens": -5}, r"max_new_tokens must be an integer of at least 0, was -5"),
        ({"max_new_tokens": True}, r"max_new_tokens must be .*, was True"),
        ({"min_new_tokens": -1}, r"min_new_tokens must be .*, was -1"),
        ({"min_new_tokens": None}, r"min_new_tokens must be .*, was None"),
        ({"seed": 2**64}, r"seed must be a 64-bit integer, was 18446744073709551616"),
        ({"seed": 1.5}, r"seed must be a 64-bit integer, was 1.5"),
        ({"stop": "end"}, r"stop must be a list of strings, was 'end'"),
        ({"stop": [1]}, r"stop must be a list of strings, was \[1\]"),
        ({"stop_token_ids": 4}, r"stop_token_ids must be a list of token ids, was 4"),
        ({"stop_token_ids": [True]}, r"stop_token_ids must be a list of token ids, was \[True\]"),
        ({"stop_token_ids": [-4]}, r"stop_token_ids must be an integer of at least 0, was -4"),
        ({"stop_token_ids": [2**63]}, r"stop_token_ids must be .*, was 9223372036854775808"),
        ({"allowed_token_ids": (1, 2)}, r"allowed_token_ids must be a list of token ids, was \(1, 2\)"),
        ({"allowed_token_ids": [3, -1]}, r"allowed_token_ids must be an integer of at least 0, was -1"),
        ({"allowed_token_ids": []}, r"allowed_token_ids is empty"),
        ({"allowed_token_ids": [5, 6, 5], "banned_token_ids": [6, 5, 1]}, r"has all of the 2 tokens"),
        ({"banned_sequences": [[1, 2], []]}, r"none of them empty"),
        ({"banned_sequences": [1]}, r"a list of lists of token ids"),
        ({"banned_sequences": [[1, -2]]}, r"banned_sequences must be .* was -2"),
        ({"allowed_token_ids": [5, 6], "banned_sequences": [[5], [6], [1, 2]]}, r"has all of the 2 tokens"),
        ({"banned_token_ids": [1.0]}, r"banned_token_ids must be a list of token ids, was \[1.0\]"),
        ({"logit_bias": [(1, 2)]}, r"logit_bias must be a dict of token ids to numbers, was \[\(1, 2\)\]"),
        ({"logit_bias": {"1": 2}}, r"logit_bias must be of token ids.*, was '1'"),
        ({"logit_bias": {-1: 2}}, r"logit_bias must be of token ids.*, was -1"),
        ({"logit_bias": {4: 100.5}}, r"logit_bias of token 4 must be in \[-100.0, 100.0\], was 100.5"),
        ({"logit_bias": {4: math.nan}}, r"logit_bias of token 4 must be in .*, was nan"),
        ({"logit_bias": {4: True}}, r"logit_bias of token 4 must be in .*, was True"),
    ],
)
def test_impossible_values_are_refused_with_the_number(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given_)


@given(
    st.builds(
        dict,
        top_k=st.integers(-1, 10**6),
        min_new_tokens=st.integers(0, 100),
        seed=st.integers(-(2**63), 2**64 - 1),
        **{name: st.floats(*bounds) for name, bounds in RANGES.items()},
    )
)
def test_all_possible_values_combine(values: dict[str, Any]) -> None:
    kept = dataclasses.asdict(SamplingParams(**values))
    assert kept == {**kept, **values}


def test_the_defaults_leave_logits_alone() -> None:
    assert not SamplingParams().needs_penalties
    assert not SamplingParams().has_logit_rules
    assert not SamplingParams(logit_bias={}, banned_token_ids=[]).has_logit_rules


@pytest.mark.parametrize(
    "given_", [{"logit_bias": {1: 0.5}}, {"allowed_token_ids": [1]}, {"banned_token_ids": [0]}]
)
def test_some_tokens_are_treated_unlike_others(given_: dict[str, Any]) -> None:
    assert SamplingParams(**given_).has_logit_rules


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_any_penalty_needs_the_tokens_so_far(name: str) -> None:
    given_: dict[str, Any] = {name: 0.5}
    assert SamplingParams(**given_).needs_penalties


def test_parameters_are_frozen_and_equal_by_value() -> None:
    params = SamplingParams(seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4  # type: ignore[misc]
    assert params == SamplingParams(seed=3) != SamplingParams()
    assert dataclasses.replace(params, seed=4).seed == 4
