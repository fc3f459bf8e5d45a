"""Defaults of sampling parameters, from ``generation_config.json`` or from the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from secrets import randbits
from typing import Any

import msgspec

from penstock.errors import CheckpointError
from penstock.pipelines.core import SamplingParams

OPENAI_DEFAULTS: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""Sampling defaults of the OpenAI API: temperature 1, and neither top_p nor top_k excludes a token."""

_SAMPLING_KEYS: Mapping[str, type[float] | type[int]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "max_new_tokens": int,
    "min_new_tokens": int,
}


def complete_sampling_params(
    given_values: Mapping[str, object],
    generation_config: Mapping[str, object],
    path: Path,
    more_defaults: Mapping[str, float] | None = None,
) -> SamplingParams:
    """Return sampling parameters with defaults for all values that are not given.

    Precedence: values in ``given_values`` that are not None, ``generation_config``, ``more_defaults``,
    OpenAI's defaults. ``"do_sample": false`` in ``generation_config`` means temperature 0. A missing seed is
    drawn at random.

    Args:
        given_values: fields of `SamplingParams`.
        generation_config: the checkpoint's ``generation_config.json``. Keys other than sampling parameters
            are ignored.
        path: the path of that file, for error messages.
        more_defaults: fields of `SamplingParams`, used where ``generation_config`` has no value.

    Raises:
        CheckpointError: the file has a value of the wrong type or out of range.
        InputError: a value in ``given_values`` is out of range.
    """
    values: dict[str, Any] = {name: value for name, value in given_values.items() if value is not None}
    defaults = {**OPENAI_DEFAULTS, **(more_defaults or {}), **_sampling_values(generation_config, path)}
    if "seed" not in values:
        values["seed"] = randbits(32)
    return SamplingParams(**{**defaults, **values})


def _sampling_values(generation_config: Mapping[str, object], path: Path) -> dict[str, float]:
    values: dict[str, float] = {}
    for key, value_type in _SAMPLING_KEYS.items():
        if generation_config.get(key) is not None:
            values[key] = _checked_value(key, generation_config[key], value_type, path)
    do_sample = generation_config.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise CheckpointError(path, f"do_sample must be true or false, is {do_sample!r}")
    if do_sample is False:
        values["temperature"] = 0.0
    return values


def _checked_value(key: str, value: object, value_type: type[float] | type[int], path: Path) -> float:
    """Return ``value`` converted to ``value_type``, after a check of its range by `SamplingParams`.

    Raises:
        CheckpointError: the value is invalid. The error names the file, because the value does not come from
            the request.
    """
    try:
        converted: Any = msgspec.convert(value, value_type)
        SamplingParams(**{key: converted})
    except ValueError as problem:  # msgspec's errors are ValueErrors too
        raise CheckpointError(path, f"{key} {value!r} cannot be used: {problem}") from problem
    return float(converted) if value_type is float else int(converted)
