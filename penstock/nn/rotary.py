"""Rotary position embeddings and the ways to stretch them over longer texts.

`default` (Su et al. 2021, arXiv:2104.09864), `linear` (Chen et al. 2023, arXiv:2306.15595), `dynamic`
(NTK-aware scaling by length), `llama3` (The Llama 3 Herd of Models 2024, arXiv:2407.21783), `yarn`
(Peng et al. 2023, arXiv:2309.00071) and `longrope` (Ding et al. 2024, arXiv:2402.13753).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import StepInputs

RotaryRows: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of this step's rows, ``[T, R / 2]`` float32 each."""


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """What a checkpoint's configuration says about its rotary embeddings."""

    dim: int  # R: how many dims of a head are rotated
    base: float
    kind: str
    max_positions: int
    """The length that the checkpoint was made for, before any stretching."""
    max_length: int
    """The length that the model may be run at."""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key_limit(self) -> int | None:
        """The longest sequence that has the short factors of LongRoPE; None where factors never change."""
        if self.kind != "longrope":
            return None
        short, long = (self.parameters.get(name) for name in ("short_factor", "long_factor"))
        return None if short == long else self.max_positions

    @classmethod
    def from_huggingface(
        cls,
        config: Any,
        head_dim: int,
        *,
        default_base: float = 10000.0,
        parameters: Mapping[str, Any] | None = None,
        supports_partial: bool = True,
    ) -> RotaryConfig:
        """Reads ``rope_parameters`` (newer files) or ``rope_theta`` and ``rope_scaling`` (older ones).

        Args:
            config: the checkpoint's configuration.
            head_dim: dims of a head, all of which are rotated unless a ``partial_rotary_factor`` is given.
            default_base: the family's own, where the checkpoint names none.
            parameters: stand in for ``rope_parameters`` where layers have several kinds.
            supports_partial: whether the family's reference implementation rotates a part of each head. If
                not, rope type ``default`` ignores ``partial_rotary_factor``, as the reference does.

        Raises:
            ConfigError: the type of rope is not known, a number it needs is missing, or a family that cannot
                rotate a part of each head needs to.
        """
        if parameters is None:
            parameters = config.section("rope_parameters") or config.section("rope_scaling")
        given = dict(parameters)
        base = _number(given, "rope_theta", config.positive("rope_theta", default_base), most=_MAX_BASE)
        kind = given.get("rope_type", given.get("type", "default"))
        if not isinstance(kind, str) or kind not in _FREQUENCIES:
            raise ConfigError("rope_type", f"unknown rope type {kind!r}: known are {', '.join(_FREQUENCIES)}")
        positions = config.count("max_position_embeddings")
        original = math.ceil(
            _number(
                given,
                "original_max_position_embeddings",
                config.count("original_max_position_embeddings", positions),
            )
        )
        max_length = positions
        if kind in ("linear", "dynamic"):
            max_length = math.floor(positions * _number(given, "factor"))
            original = positions
        elif kind == "yarn":
            max_length = max(positions, math.floor(original * _number(given, "factor")))
        elif kind == "longrope":
            if given.get("factor") is None:
                given["factor"] = max(1.0, positions / original)
        dim = _rotated_dims(config, given, head_dim, kind, supports_partial)
        if dim < 2 or dim % 2:
            raise ConfigError("head_dim", f"rotary embeddings need an even number of dims, were given {dim}")
        if kind == "dynamic" and dim < 4:
            raise ConfigError("head_dim", f"rope type 'dynamic' needs at least 4 dims, were given {dim}")
        return cls(dim, base, kind, original, max_length, given)


def _rotated_dims(
    config: Any, parameters: Mapping[str, Any], head_dim: int, kind: str, supports_partial: bool
) -> int:
    """Return how many dims of a head are rotated."""
    if kind == "default" and not supports_partial:
        return head_dim
    top = config.positive("partial_rotary_factor", 1.0)
    fraction = _number(parameters, "partial_rotary_factor", top)
    if fraction > 1:
        raise ConfigError("partial_rotary_factor", f"must be at most 1, was {fraction}")
    dim = int(head_dim * fraction)
    if dim != head_dim and not supports_partial:
        raise ConfigError(
            "partial_rotary_factor",
            f"is {fraction:g}, but with rope type {kind!r} this family can only rotate all {head_dim} dims "
            "of a head: remove the factor or set it to 1",
        )
    return dim


class Rotary:
    """The tables of one rotary embedding; `rows` picks this step's part once for all layers."""

    def __init__(self, config: RotaryConfig, max_length: int, device: torch.device) -> None:
        self.config = config
        changes = config.kind == "dynamic" or config.key_limit is not None
        self.length_dependent = changes and max_length > config.max_positions
        """Whether the angles change with the length of the text, not only with the position."""
        frequencies, factor = _FREQUENCIES[config.kind](config)
        self.cos, self.sin = _tables(frequencies, factor, max_length, device)  # [P, R / 2]
        if config.kind == "longrope" and self.length_dependent:  # a second half: those of longer texts
            long = _tables(_longrope(config, "long_factor")[0], factor, max_length, device)
            self.cos, self.sin = torch.cat([self.cos, long[0]]), torch.cat([self.sin, long[1]])

    def rows(self, step: StepInputs) -> RotaryRows:
        """Cosines and sines for ``step.positions``."""
        positions = step.positions
        if self.length_dependent and step.text_lengths is not None:
            if self.config.kind == "dynamic":
                return self._stretched_rows(positions, step.text_lengths)
            positions = positions + (step.text_lengths > self.config.max_positions) * (len(self.cos) // 2)
        return step.ops.rope_rows(positions, self.cos, self.sin)

    def _stretched_rows(self, positions: Tensor, lengths: Tensor) -> RotaryRows:
        """Dynamic scaling: the base grows once the text is longer than the checkpoint was made for."""
        config = self.config
        factor = _number(config.parameters, "factor")
        length = lengths.clamp_min(config.max_positions).double()  # [T]
        stretch = factor * length / config.max_positions - (factor - 1)
        base = config.base * stretch ** (config.dim / (config.dim - 2))
        exponents = torch.arange(0, config.dim, 2, device=positions.device).double() / config.dim
        frequencies = (1.0 / base[:, None] ** exponents).float()  # [T, R / 2]
        angles = positions[:, None].float() * frequencies
        return angles.cos(), angles.sin()


def _tables(
    frequencies: Tensor, factor: float, max_length: int, device: torch.device
) -> tuple[Tensor, Tensor]:  # cosines and sines, [P, R / 2] each
    angles = torch.outer(torch.arange(max_length, dtype=torch.float32), frequencies)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def _plain_frequencies(config: RotaryConfig) -> Tensor:  # [R / 2] float32
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    return 1.0 / config.base**exponents


def _default(config: RotaryConfig) -> tuple[Tensor, float]:
    return _plain_frequencies(config), 1.0


def _linear(config: RotaryConfig) -> tuple[Tensor, float]:
    return _plain_frequencies(config) / _number(config.parameters, "factor"), 1.0


def _llama3(config: RotaryConfig) -> tuple[Tensor, float]:
    """Long waves are slowed by the factor, short ones kept, those between blended."""
    plain = _plain_frequencies(config)
    factor = _number(config.parameters, "factor")
    low = _number(config.parameters, "low_freq_factor")
    high = _number(config.parameters, "high_freq_factor")
    original = _number(config.parameters, "original_max_position_embeddings")
    waves_in_original = original * plain / (2 * math.pi)
    blend = ((waves_in_original - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / factor + blend * plain, 1.0


def _yarn(config: RotaryConfig) -> tuple[Tensor, float]:
    """Dims that turn often within the original length are kept, slow ones interpolated, a ramp between."""
    parameters = config.parameters
    factor = _number(parameters, "factor")
    plain = _plain_frequencies(config)

    def dim_that_turns(times: float) -> float:
        turns = config.max_positions / (times * 2 * math.pi)
        return config.dim * math.log(turns) / (2 * math.log(config.base))

    if config.base <= 1:
        raise ConfigError("rope_theta", f"must be above 1 for rope type 'yarn', was {config.base}")
    first = dim_that_turns(_number(parameters, "beta_fast", 32))
    last = dim_that_turns(_number(parameters, "beta_slow", 1))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.dim - 1)
    steps = torch.arange(config.dim // 2, dtype=torch.float32)
    interpolated = ((steps - first) / max(last - first, 0.001)).clamp(0, 1)
    return plain / factor * interpolated + plain * (1 - interpolated), _yarn_magnitude(parameters, factor)


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if not (parameters.get("mscale") and parameters.get("mscale_all_dim")):
        return magnitude(1.0)
    return magnitude(_number(parameters, "mscale")) / magnitude(_number(parameters, "mscale_all_dim"))


def _longrope(config: RotaryConfig, which: str = "short_factor") -> tuple[Tensor, float]:
    """Each pair of dims is slowed by a factor of its own, in texts up to the original length and beyond."""
    factors = config.parameters.get(which)
    if not isinstance(factors, list) or len(factors) != config.dim // 2:
        raise ConfigError(
            f"rope_scaling.{which}", f"must be a list of {config.dim // 2} numbers, was {factors!r}"
        )
    slowed = [_number({which: factor}, which) for factor in factors]
    frequencies = _plain_frequencies(config) / torch.tensor(slowed, dtype=torch.float32)
    if config.parameters.get("attention_factor") is not None:
        return frequencies, _number(config.parameters, "attention_factor")
    stretch = _number(config.parameters, "factor")
    if stretch <= 1 or config.max_positions < 2:
        return frequencies, 1.0
    return frequencies, math.sqrt(1 + math.log(stretch) / math.log(config.max_positions))


_FREQUENCIES: dict[str, Callable[[RotaryConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


_LARGEST = 1e9
_MAX_BASE = 1e30


def _number(
    parameters: Mapping[str, Any], name: str, default: float | None = None, *, most: float = _LARGEST
) -> float:
    value = parameters.get(name)
    if value is None and default is not None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"rope_scaling.{name}", f"must be a positive number, was {value!r}")
    if value > most:
        raise ConfigError(f"rope_scaling.{name}", f"must be at most {most:g}, was {value!r}")
    return float(value)
