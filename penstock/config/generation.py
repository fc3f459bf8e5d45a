"""Sampling parameters that a request leaves open: from ``generation_config.json``, else OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from secrets import randbits
from typing import Any

import msgspec

from penstock.errors import CheckpointError
from penstock.pipelines.core import SamplingParams

OPENAI_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""What the OpenAI API does where a request says nothing: sample from all tokens."""

_KEYS: Mapping[str, Any] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "max_new_tokens": int,
    "min_new_tokens": int,
}


def complete_sampling_params(
    given: Mapping[str, Any], generation_config: Mapping[str, Any], path: Path
) -> SamplingParams:
    """Sampling parameters with every open value filled in.

    A value given (not None) comes before one of ``generation_config``, and that before OpenAI's default.
    ``"do_sample": false`` there means temperature 0. An absent seed is drawn.

    Args:
        given: fields of `SamplingParams`.
        generation_config: the checkpoint's ``generation_config.json``; keys that say nothing of sampling
            are none of ours.
        path: that file, for the message.

    Raises:
        CheckpointError: the file has a value of the wrong type or out of range.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    defaults = {**OPENAI_DEFAULTS, **_sampling_values(generation_config, path)}
    if "seed" not in chosen:
        chosen["seed"] = randbits(32)
    return SamplingParams(**{**defaults, **chosen})


def _sampling_values(generation_config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    values = {}
    for key, kind in _KEYS.items():
        if generation_config.get(key) is not None:
            values[key] = _checked(key, generation_config[key], kind, path)
    do_sample = generation_config.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise CheckpointError(path, f"do_sample must be true or false, is {do_sample!r}")
    if do_sample is False:
        values["temperature"] = 0.0
    return values


def _checked(key: str, value: Any, kind: type, path: Path) -> Any:
    """The value where `SamplingParams` takes it, so that the file is blamed and not the request."""
    try:
        converted: Any = msgspec.convert(value, kind)
        SamplingParams(**{key: converted})
    except ValueError as problem:  # msgspec's errors are of this class too
        raise CheckpointError(path, f"{key} {value!r} cannot be used: {problem}") from problem
    return converted
