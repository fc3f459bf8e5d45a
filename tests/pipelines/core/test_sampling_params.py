"""Sampling parameters: the accepted numbers, and errors that name the parameter and the value."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError, UnknownParameterError
from penstock.pipelines.core import SamplingParams, msgpack_numpy_decoder, msgpack_numpy_encoder

RANGES = {
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "temperature": (0.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}


@pytest.mark.parametrize(
    "values",
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
def test_valid_values_are_kept(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values
    assert msgpack_numpy_decoder(SamplingParams)(msgpack_numpy_encoder()(params)) == params


@pytest.mark.parametrize("name", [*RANGES, "repetition_penalty"])
@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, True, np.True_, None, "1", 10**400, Fraction(10**400), 1j),
        *(np.float32("nan"), np.float64("inf"), np.float16("-inf"), np.array(0.5), np.array([0.5])),
        *(Decimal("NaN"), Decimal("sNaN"), Decimal("-Infinity"), Decimal("1e400")),
    ],
    ids=repr,
)
def test_values_that_are_not_finite_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError) as exc_info:
        SamplingParams(**{name: value})
    assert str(exc_info.value).startswith(f"{name} must be ")
    assert str(exc_info.value).endswith(f", was {value!r}")


@pytest.mark.parametrize("value", ["1", 1j, None, True, np.array(0.5)], ids=repr)
def test_the_error_states_that_a_number_is_expected(value: Any) -> None:
    with pytest.raises(InputError, match=r"top_p must be a number in \[0.0, 1.0\], was "):
        SamplingParams(top_p=value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        *(
            ({name: kind(0.5)}, {name: 0.5})
            for name in RANGES
            for kind in (np.float16, np.float32, np.float64)
        ),
        ({"temperature": np.int8(1), "top_p": np.uint64(1)}, {"temperature": 1, "top_p": 1}),
        ({"temperature": Fraction(1, 2)}, {"temperature": 0.5}),
        ({"temperature": Decimal("0.5"), "top_p": Decimal(1)}, {"temperature": 0.5, "top_p": 1.0}),
        ({"repetition_penalty": np.longdouble(1.5)}, {"repetition_penalty": 1.5}),
        ({"top_k": np.int64(5), "seed": np.uint64(2**64 - 1)}, {"top_k": 5, "seed": 2**64 - 1}),
        (
            {"max_new_tokens": np.int32(3), "min_new_tokens": np.uint8(2)},
            {"max_new_tokens": 3, "min_new_tokens": 2},
        ),
        ({"ignore_eos": np.True_, "detokenize": np.False_}, {"ignore_eos": True, "detokenize": False}),
        ({"stop": [np.str_("a")]}, {"stop": ["a"]}),
        ({"stop_token_ids": np.array([1, 2])}, {"stop_token_ids": [1, 2]}),
        ({"allowed_token_ids": (np.int64(1), 2)}, {"allowed_token_ids": [1, 2]}),
        ({"banned_token_ids": [np.uint16(7)]}, {"banned_token_ids": [7]}),
        ({"banned_sequences": [[np.int64(1), 2], (3,)]}, {"banned_sequences": [[1, 2], [3]]}),
        ({"logit_bias": {np.int64(3): np.float32(-1)}}, {"logit_bias": {3: -1.0}}),
    ],
    ids=repr,
)
def test_values_of_convertible_types_become_builtin_values(
    values: dict[str, Any], expected: dict[str, Any]
) -> None:
    params = SamplingParams(**values)
    for name, value in expected.items():
        kept_value = getattr(params, name)
        assert repr(kept_value) == repr(value)  # compares types and values, including those of elements
    assert msgpack_numpy_decoder(SamplingParams)(msgpack_numpy_encoder()(params)) == SamplingParams(
        **expected
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_tokens", "did you mean max_new_tokens?"),
        ("max_completion_tokens", "did you mean max_new_tokens?"),
        ("min_tokens", "did you mean min_new_tokens?"),
        ("repeat_penalty", "did you mean repetition_penalty?"),
        ("stop_strings", "did you mean stop?"),
        ("temperatur", "did you mean temperature?"),
        ("n", "LLM.generate and LLM.chat have the parameter n"),
        ("num_beams", "LLM.beam_search has the parameter num_beams"),
        ("do_sample", "temperature=0 is greedy, a higher temperature samples"),
        ("zzz", "the parameters are allowed_token_ids, banned_sequences, "),
    ],
)
def test_the_error_for_an_unknown_name_suggests_a_known_one(name: str, hint: str) -> None:
    unknown_fields: dict[str, Any] = {name: 1}
    with pytest.raises(UnknownParameterError) as exc_info:
        SamplingParams(**unknown_fields)
    assert str(exc_info.value).startswith(f"SamplingParams: unknown parameter {name}; {hint}")
    assert isinstance(exc_info.value, TypeError)
    assert isinstance(exc_info.value, InputError)
    assert exc_info.value.parameter == name


def test_a_parameter_given_twice_raises_type_error() -> None:
    with pytest.raises(TypeError, match="multiple values") as exc_info:
        SamplingParams(1, top_k=2)  # type: ignore[misc]
    assert not isinstance(exc_info.value, InputError)


@pytest.mark.parametrize(("name", "bounds"), RANGES.items())
def test_numbers_out_of_range_are_refused(name: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    for value in (math.nextafter(low, -9), math.nextafter(high, 9)):
        values: dict[str, Any] = {name: value}
        with pytest.raises(InputError, match=rf"{name} must be in \[{low}, {high}\], was {value}"):
            SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
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
        ({"allowed_token_ids": {1, 2}}, r"allowed_token_ids must be a list of token ids, was {1, 2}"),
        ({"stop_token_ids": np.array([[1]])}, r"stop_token_ids must be a list of token ids, was array"),
        ({"stop_token_ids": [np.float64(1)]}, r"stop_token_ids must be a list of token ids, was \["),
        ({"top_k": np.float64(1)}, r"top_k must be .*, was np.float64\(1.0\)"),
        ({"top_k": np.int64(-2)}, r"top_k must be .*, was np.int64\(-2\)"),
        ({"seed": np.True_}, r"seed must be .*, was np.True_"),
        ({"ignore_eos": "no"}, r"ignore_eos must be True or False, was 'no'"),
        ({"detokenize": None}, r"detokenize must be True or False, was None"),
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
        ({"logit_bias": {4: True}}, r"logit_bias of token 4 must be a number in .*, was True"),
    ],
)
def test_an_invalid_value_is_refused_with_the_reason(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


@given(
    st.builds(
        dict,
        top_k=st.integers(-1, 10**6),
        min_new_tokens=st.integers(0, 100),
        seed=st.integers(-(2**63), 2**64 - 1),
        **{name: st.floats(*bounds) for name, bounds in RANGES.items()},
    )
)
def test_all_valid_numbers_can_be_combined(values: dict[str, Any]) -> None:
    kept_values = dataclasses.asdict(SamplingParams(**values))
    assert kept_values == {**kept_values, **values}


def test_the_defaults_do_not_change_logits() -> None:
    assert not SamplingParams().needs_penalties
    assert not SamplingParams().has_logit_rules
    assert not SamplingParams(logit_bias={}, banned_token_ids=[]).has_logit_rules


@pytest.mark.parametrize(
    "values", [{"logit_bias": {1: 0.5}}, {"allowed_token_ids": [1]}, {"banned_token_ids": [0]}]
)
def test_has_logit_rules_is_true_if_a_rule_is_set(values: dict[str, Any]) -> None:
    assert SamplingParams(**values).has_logit_rules


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_needs_penalties_is_true_if_a_penalty_is_set(name: str) -> None:
    values: dict[str, Any] = {name: 0.5}
    assert SamplingParams(**values).needs_penalties


def test_parameters_are_frozen_and_equal_by_value() -> None:
    params = SamplingParams(seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4  # type: ignore[misc]
    assert params == SamplingParams(seed=3) != SamplingParams()
    assert dataclasses.replace(params, seed=4).seed == 4
