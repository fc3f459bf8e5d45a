"""Errors for unknown keyword arguments. They suggest the parameter that was probably meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from penstock.errors import UnknownParameterError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

_SAME = {
    "max_new_tokens": (
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "n_predict",
        "num_predict",
    ),
    "min_new_tokens": ("min_tokens",),
    "repetition_penalty": ("repeat_penalty", "penalty_repeat"),
    "frequency_penalty": ("penalty_freq",),
    "presence_penalty": ("penalty_present",),
    "stop": ("stop_strings", "stop_sequences", "stop_words", "stops", "eos_sequences"),
    "stop_token_ids": ("eos_token_id", "eos_token_ids", "stop_ids"),
    "banned_token_ids": ("bad_words_ids", "suppress_tokens"),
    "temperature": ("temp",),
    "seed": ("random_seed",),
    "n": ("num_return_sequences", "num_choices"),
    "logprobs": ("num_logprobs", "top_logprobs"),
    "adapter": ("lora", "lora_name", "lora_request"),
    "chat_template_kwargs": ("chat_template_options",),
}
"""Parameter -> its names in other libraries."""
_MEANT = {alias: name for name, aliases in _SAME.items() for alias in aliases}
_OF_CALLS = "n best_of logprobs prompt_logprobs grammar response_format adapter priority".split()
_OF_BEAMS = "num_beams length_penalty early_stopping".split()


def hinting(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that unknown keywords raise `UnknownParameterError` instead of ``TypeError``."""
    parameters = signature(function).parameters.values()
    known = frozenset(
        parameter.name for parameter in parameters if parameter.kind is not Parameter.POSITIONAL_ONLY
    )

    @wraps(function)
    def hinted(*args: P.args, **kwargs: P.kwargs) -> R:
        if not known.issuperset(kwargs):
            raise _unknown(function.__qualname__.removesuffix(".__init__"), kwargs, known)
        return function(*args, **kwargs)

    return hinted


_CONSTRUCTOR_PARAMETERS: dict[str, frozenset[str]] = {}
"""Class name -> parameters of its constructor, for the classes that `hinting_class` decorates."""


def hinting_class(cls: C) -> C:
    """Return the class with a constructor wrapped by `hinting`."""
    _CONSTRUCTOR_PARAMETERS[cls.__name__] = frozenset(signature(cls).parameters)
    setattr(cls, "__init__", hinting(cls.__init__))  # type: ignore[misc]  # noqa: B010
    return cls


def _unknown(owner: str, given: Iterable[str], known: frozenset[str]) -> UnknownParameterError:
    name = next(parameter for parameter in given if parameter not in known)
    return UnknownParameterError(owner, name, _hint(name, owner, sorted(known - {"self"})))


def _hint(name: str, owner: str, known: list[str]) -> str:
    meant = _MEANT.get(name, name)
    if meant in known:
        return f"did you mean {meant}?"
    if "sampling_params" in known and meant in _sampling_parameters():
        return f"did you mean sampling_params=SamplingParams({meant}=...)?"
    nearest = get_close_matches(name, known, n=1, cutoff=0.7)
    if nearest:
        return f"did you mean {nearest[0]}?"
    if owner == "SamplingParams" and meant in _OF_CALLS:
        return f"LLM.generate and LLM.chat have the parameter {meant}"
    if meant in _OF_BEAMS:
        return f"LLM.beam_search has the parameter {meant}"
    if meant == "do_sample":
        return "temperature=0 is greedy, a higher temperature samples"
    return f"the parameters are {', '.join(known)}"


def _sampling_parameters() -> frozenset[str]:
    return _CONSTRUCTOR_PARAMETERS.get("SamplingParams", frozenset())
