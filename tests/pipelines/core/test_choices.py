"""`choice_contexts`: contexts of the choices of a request, their ids and seeds."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from support.kv_contexts import text_context

from penstock.errors import InputError
from penstock.pipelines.core import Grammar, SamplingParams
from penstock.pipelines.core.choices import choice_contexts
from penstock.pipelines.core.randomness import splitmix64

PARAMS = SamplingParams(seed=7, temperature=0.5, stop=["x"], logit_bias={3: 1.0})


def test_a_single_choice_uses_the_context_itself() -> None:
    context = text_context([1, 2, 3])
    assert choice_contexts(context, 1) == [context]
    assert choice_contexts(context, 1)[0] is context


def test_choices_differ_only_in_id_and_seed() -> None:
    fields: dict[str, Any] = {
        "eos_token_ids": {9},
        "log_probabilities": 2,
        "log_probabilities_echo": True,
        "grammar": Grammar("regex", "a+"),
        "adapter": "mine",
        "cache_salt": "salt",
        "priority": 3,
        "token_hash_overrides": {1: 5},
    }
    context = text_context([1, 2, 3], sampling_params=PARAMS, request_id="request", **fields)
    choices = choice_contexts(context, 3)
    assert [choice.request_id for choice in choices] == ["request-0", "request-1", "request-2"]
    seeds = [choice.sampling_params.seed for choice in choices]
    assert seeds == [7, splitmix64(7, 1), splitmix64(7, 2)]
    for choice, seed in zip(choices, seeds, strict=True):
        assert choice.sampling_params == dataclasses.replace(PARAMS, seed=seed)
        assert {name: getattr(choice, name) for name in fields} == fields
        assert choice.all_tokens.tolist() == [1, 2, 3]
        assert (choice.prompt, choice.max_length) == (context.prompt, context.max_length)


def test_choices_do_not_share_state() -> None:
    from penstock.pipelines.core import LogProbabilities

    first_choice, second_choice = choice_contexts(
        text_context([1, 2], eos_token_ids={9}, log_probabilities=1), 2
    )
    first_choice.update(5, LogProbabilities([-1.0], [{5: -1.0}]))
    first_choice.eos_token_ids.add(4)
    first_choice.token_hash_overrides[0] = 8
    assert second_choice.all_tokens.tolist() == [1, 2]
    assert (second_choice.eos_token_ids, second_choice.token_hash_overrides) == ({9}, {})
    second_choice.update(6)
    assert first_choice.generated_tokens.tolist() == [5]
    assert second_choice.outstanding_completion_tokens() == [(6, None)]


def test_a_negative_seed_counts_modulo_2_to_the_64_for_later_choices() -> None:
    choices = choice_contexts(text_context([1], sampling_params=SamplingParams(seed=-1)), 2)
    assert [choice.sampling_params.seed for choice in choices] == [-1, splitmix64(2**64 - 1, 1)]


@pytest.mark.parametrize("n", [0, -1, True, 1.0, None])
def test_invalid_numbers_of_choices_are_refused(n: Any) -> None:
    with pytest.raises(InputError, match=f"n must be an integer of at least 1, was {n!r}"):
        choice_contexts(text_context([1]), n)


def test_a_context_with_generated_tokens_is_refused() -> None:
    context = text_context([1])
    context.update(2)
    with pytest.raises(AssertionError, match="has started"):
        choice_contexts(context, 2)


def test_importing_choices_loads_no_torch() -> None:
    code = "import sys, penstock.pipelines.core.choices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
