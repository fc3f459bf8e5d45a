"""Decorators whose errors for unknown keyword arguments suggest a parameter, or list all parameters."""

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

_ALIASES = {
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
"""Maps each parameter to its names in other libraries."""
_PARAMETER_BY_ALIAS = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}
_GENERATE_PARAMETERS = "n best_of logprobs prompt_logprobs grammar response_format adapter priority".split()
_BEAM_SEARCH_PARAMETERS = "num_beams length_penalty early_stopping".split()


def suggest_parameters(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that unknown keyword arguments raise `UnknownParameterError`, not ``TypeError``."""
    parameters = signature(function).parameters.values()
    known = frozenset(
        parameter.name for parameter in parameters if parameter.kind is not Parameter.POSITIONAL_ONLY
    )

    @wraps(function)
    def checked_call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not known.issuperset(kwargs):
            raise _unknown_parameter(function.__qualname__.removesuffix(".__init__"), kwargs, known)
        return function(*args, **kwargs)

    return checked_call


_CONSTRUCTOR_PARAMETERS: dict[str, frozenset[str]] = {}
"""Maps the name of each class with `suggest_constructor_parameters` to its constructor parameters."""


def suggest_constructor_parameters(cls: C) -> C:
    """Return the class with a constructor wrapped by `suggest_parameters`."""
    _CONSTRUCTOR_PARAMETERS[cls.__name__] = frozenset(signature(cls).parameters)
    setattr(cls, "__init__", suggest_parameters(cls.__init__))  # type: ignore[misc]  # noqa: B010
    return cls


def _unknown_parameter(
    function: str, keywords: Iterable[str], known: frozenset[str]
) -> UnknownParameterError:
    name = next(keyword for keyword in keywords if keyword not in known)
    return UnknownParameterError(function, name, _hint(name, function, sorted(known - {"self"})))


def _hint(name: str, function: str, known: list[str]) -> str:
    parameter = _PARAMETER_BY_ALIAS.get(name, name)
    if parameter in known:
        return f"did you mean {parameter}?"
    if "sampling_params" in known and parameter in _sampling_parameters():
        return f"did you mean sampling_params=SamplingParams({parameter}=...)?"
    nearest = get_close_matches(name, known, n=1, cutoff=0.7)
    if nearest:
        return f"did you mean {nearest[0]}?"
    if function == "SamplingParams" and parameter in _GENERATE_PARAMETERS:
        return f"LLM.generate and LLM.chat have the parameter {parameter}"
    if parameter in _BEAM_SEARCH_PARAMETERS:
        return f"LLM.beam_search has the parameter {parameter}"
    if parameter == "do_sample":
        return "temperature=0 is greedy, a higher temperature samples"
    return f"the parameters are {', '.join(known)}"


def _sampling_parameters() -> frozenset[str]:
    return _CONSTRUCTOR_PARAMETERS.get("SamplingParams", frozenset())
