"""Rotary position embeddings, and the methods that extend them to longer sequences.

Rope types: ``default`` (Su et al. 2021, arXiv:2104.09864), ``linear`` (Chen et al. 2023, arXiv:2306.15595),
``dynamic`` (NTK-aware scaling by the length of the sequence), ``llama3`` (The Llama 3 Herd of Models 2024,
arXiv:2407.21783), ``yarn`` (Peng et al. 2023, arXiv:2309.00071), ``longrope`` (Ding et al. 2024,
arXiv:2402.13753) and ``proportional`` (Gemma 4: only the pairs with the highest frequencies are rotated).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import StepInputs
from penstock.nn.config_values import ConfigValues

RotaryRows: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the tokens of a step, ``[T, R / 2]`` float32 each."""


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """The parameters of one rotary embedding, read from a checkpoint's configuration."""

    dim: int  # R: the number of dims of a head that are rotated
    base: float
    kind: str
    """The rope type."""
    max_positions: int
    """The length in tokens for which the model was trained, before any extension."""
    max_length: int
    """The longest sequence that the embedding supports, in tokens."""
    parameters: Mapping[str, object] = field(default_factory=dict)
    axes: tuple[int, ...] | None = None
    """``[R / 2]``: the position axis whose position rotates each pair of dims; None for one axis."""
    is_interleaved: bool = False
    """Whether the pairs of dims are (2 i, 2 i + 1); otherwise they are (i, i + R / 2)."""

    @property
    def short_factor_max_length(self) -> int | None:
        """Length up to which LongRoPE uses its short factors; None for other rope types or equal factors."""
        if self.kind != "longrope":
            return None
        short, long = (self.parameters.get(name) for name in ("short_factor", "long_factor"))
        return None if short == long else self.max_positions

    @classmethod
    def from_huggingface(
        cls,
        config: ConfigValues,
        head_dim: int,
        *,
        default_rope_theta: float = 10000.0,
        parameters: Mapping[str, object] | None = None,
        supports_partial: bool = True,
        default_fraction: float = 1.0,
    ) -> RotaryConfig:
        """Read ``rope_parameters`` (newer files) or ``rope_theta`` and ``rope_scaling`` (older files).

        Args:
            config: the checkpoint's configuration.
            head_dim: dims of a head. ``partial_rotary_factor`` is the fraction of them that is rotated.
            default_rope_theta: the family's base, used if the checkpoint has none.
            parameters: used instead of ``rope_parameters``, for families with several rotary embeddings.
            supports_partial: whether the family's reference implementation supports partial rotation. If it
                does not, rope type ``default`` ignores ``partial_rotary_factor``, like the reference.
            default_fraction: the family's ``partial_rotary_factor``, used if the checkpoint has none.

        Raises:
            ConfigError: the rope type is unknown, a value is missing or invalid, or the file configures
                partial rotation with a rope type other than ``default`` in a family that does not support
                it. `Rotary` checks the other parameters of the rope type.
        """
        if parameters is None:
            values = rope_values(config)
        else:
            values = dict(parameters)
        base = _number(
            values, "rope_theta", config.number("rope_theta", default_rope_theta), maximum=_MAX_BASE
        )
        kind = values.get("rope_type", values.get("type", "default"))
        if not isinstance(kind, str) or kind not in _FREQUENCIES:
            raise ConfigError("rope_type", f"unknown rope type {kind!r}: known are {', '.join(_FREQUENCIES)}")
        positions = config.integer("max_position_embeddings")
        original = math.ceil(
            _number(
                values,
                "original_max_position_embeddings",
                config.integer("original_max_position_embeddings", positions),
            )
        )
        max_length = positions
        if kind in ("linear", "dynamic"):
            max_length = math.floor(positions * _number(values, "factor"))
            original = positions
        elif kind == "yarn":
            max_length = max(positions, math.floor(original * _number(values, "factor")))
        elif kind == "longrope":
            if values.get("factor") is None:
                values["factor"] = max(1.0, positions / original)
        dim = _rotated_dims(config, values, head_dim, kind, supports_partial, default_fraction)
        if dim < 2 or dim % 2:
            raise ConfigError(
                "head_dim",
                f"rotary embeddings need at least 2 dims and an even number of dims, were given {dim}",
            )
        if kind == "dynamic" and dim < 4:
            raise ConfigError("head_dim", f"rope type 'dynamic' needs at least 4 dims, were given {dim}")
        return cls(dim, base, kind, original, max_length, values)


def _rotated_dims(
    config: ConfigValues,
    parameters: Mapping[str, object],
    head_dim: int,
    kind: str,
    supports_partial: bool,
    default_fraction: float,
) -> int:
    """Return the number of dims of a head that are rotated. Rope type ``proportional`` rotates some by 0."""
    if kind == "proportional" or (kind == "default" and not supports_partial):
        return head_dim
    default = config.number("partial_rotary_factor", default_fraction)
    fraction = _number(parameters, "partial_rotary_factor", default)
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


def rotary_configs_by_type(
    config: ConfigValues, head_dim: int, bases: Mapping[str, float]
) -> dict[str, RotaryConfig]:
    """Return the configuration of the rotary embedding of each layer type.

    Newer files have ``rope_parameters`` for each type. In older files, ``rope_scaling`` applies only to the
    first type in ``bases``.

    Args:
        config: the checkpoint's configuration.
        head_dim: dims of a head.
        bases: the default base of each layer type.

    Raises:
        ConfigError: ``rope_parameters`` has a key that is not one of the layer types, or a rotary embedding
            is invalid.
    """
    sections = config.section("rope_parameters")
    if set(sections) - set(bases):
        raise ConfigError(
            "rope_parameters", f"may only contain {' and '.join(bases)}, contains {', '.join(sections)}"
        )
    defaults: dict[str, dict[str, object]] = {kind: {"rope_theta": base} for kind, base in bases.items()}
    scaling = config.section("rope_scaling")
    defaults[next(iter(bases))] |= {key: scaling[key] for key in scaling}
    rotaries = {}
    for kind in bases:
        section = sections.section(kind)
        parameters = defaults[kind] | {key: section[key] for key in section}
        rotaries[kind] = RotaryConfig.from_huggingface(
            config, head_dim, parameters=parameters, supports_partial=False
        )
    return rotaries


def rope_values(config: ConfigValues) -> dict[str, object]:
    """Return a copy of ``rope_parameters`` (newer files) or ``rope_scaling`` (older files), or ``{}``."""
    section = config.section("rope_parameters") or config.section("rope_scaling")
    return {key: section[key] for key in section}


class Rotary:
    """The cosine and sine tables of one rotary embedding. `rows` is called once per step, for all layers."""

    def __init__(self, config: RotaryConfig, max_length: int, device: torch.device) -> None:
        self.config = config
        has_length_scaling = config.kind == "dynamic" or config.short_factor_max_length is not None
        self.is_length_dependent = has_length_scaling and max_length > config.max_positions
        """Whether the angles depend on the length of the sequence, not only on the position."""
        frequencies, factor = _FREQUENCIES[config.kind](config)
        self.cos, self.sin = _tables(frequencies, factor, max_length, device)  # [P, R / 2]
        self._axes = torch.tensor(config.axes or (), dtype=torch.int64).to(device)  # [R / 2], or empty
        if (
            config.kind == "longrope" and self.is_length_dependent
        ):  # append rows P to 2P - 1 with long factors
            long = _tables(_longrope(config, "long_factor")[0], factor, max_length, device)
            self.cos, self.sin = torch.cat([self.cos, long[0]]), torch.cat([self.sin, long[1]])

    def rows(self, step: StepInputs) -> RotaryRows:
        """Return the cosines and sines for ``step.positions``.

        The positions are ``[T]``, or ``[A, T]`` for A position axes.
        """
        positions = step.positions
        if positions.dim() == 2:
            return self._multi_axis_rows(positions)
        if self.is_length_dependent and step.text_lengths is not None:
            if self.config.kind == "dynamic":
                return self._dynamic_rows(positions, step.text_lengths)
            positions = positions + (step.text_lengths > self.config.max_positions) * (len(self.cos) // 2)
        return step.ops.rope_rows(positions, self.cos, self.sin)

    def _multi_axis_rows(self, positions: Tensor) -> RotaryRows:  # [A, T]
        """Return the rows of multimodal RoPE, in which each pair of dims has one of the position axes."""
        row_indices = positions[self._axes].T  # [T, R / 2]
        return self.cos.gather(0, row_indices), self.sin.gather(0, row_indices)

    def _dynamic_rows(self, positions: Tensor, lengths: Tensor) -> RotaryRows:
        """Return the rows of rope type ``dynamic``. The base grows with the length beyond ``max_positions``.

        Args:
            positions: ``[T]``.
            lengths: ``[T]``, the sequence length that determines the base of each row.
        """
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
    """Keep high frequencies, divide low frequencies by the factor, and interpolate the others linearly."""
    frequencies = _plain_frequencies(config)
    factor = _number(config.parameters, "factor")
    low_freq_factor = _number(config.parameters, "low_freq_factor")
    high_freq_factor = _number(config.parameters, "high_freq_factor")
    original_length = _number(config.parameters, "original_max_position_embeddings")
    rotations = original_length * frequencies / (2 * math.pi)  # full rotations within the original length
    unscaled_share = ((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - unscaled_share) * frequencies / factor + unscaled_share * frequencies, 1.0


def _yarn(config: RotaryConfig) -> tuple[Tensor, float]:
    """Keep high frequencies, divide low frequencies by the factor, and interpolate the others linearly."""
    parameters = config.parameters
    factor = _number(parameters, "factor")
    frequencies = _plain_frequencies(config)

    def pair_with_rotations(rotations: float) -> float:
        """Return the fractional index of the pair of dims with this many rotations in the original length."""
        positions_per_radian = config.max_positions / (rotations * 2 * math.pi)
        return config.dim * math.log(positions_per_radian) / (2 * math.log(config.base))

    if config.base <= 1:
        raise ConfigError("rope_theta", f"must be above 1 for rope type 'yarn', was {config.base}")
    first_pair = pair_with_rotations(_number(parameters, "beta_fast", 32))
    last_pair = pair_with_rotations(_number(parameters, "beta_slow", 1))
    if parameters.get("truncate", True):
        first_pair, last_pair = math.floor(first_pair), math.ceil(last_pair)
    first_pair, last_pair = max(first_pair, 0), min(last_pair, config.dim - 1)
    pairs = torch.arange(config.dim // 2, dtype=torch.float32)
    scaled_share = ((pairs - first_pair) / max(last_pair - first_pair, 0.001)).clamp(0, 1)
    return frequencies / factor * scaled_share + frequencies * (1 - scaled_share), _yarn_magnitude(
        parameters, factor
    )


def _yarn_magnitude(parameters: Mapping[str, object], factor: float) -> float:
    """Return the factor by which rope type ``yarn`` multiplies cosines and sines."""
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if not (parameters.get("mscale") and parameters.get("mscale_all_dim")):
        return magnitude(1.0)
    return magnitude(_number(parameters, "mscale")) / magnitude(_number(parameters, "mscale_all_dim"))


def _longrope(config: RotaryConfig, key: str = "short_factor") -> tuple[Tensor, float]:
    """Divide each frequency by its factor in the list ``key`` of the configuration.

    The list is ``short_factor``, or ``long_factor`` for sequences longer than the original length.
    """
    factors = config.parameters.get(key)
    if not isinstance(factors, list) or len(factors) != config.dim // 2:
        raise ConfigError(key, f"must be a list of {config.dim // 2} numbers, was {factors!r}")
    divisors = [_number({key: factor}, key) for factor in factors]
    frequencies = _plain_frequencies(config) / torch.tensor(divisors, dtype=torch.float32)
    if config.parameters.get("attention_factor") is not None:
        return frequencies, _number(config.parameters, "attention_factor")
    stretch = _number(config.parameters, "factor")
    if stretch <= 1 or config.max_positions < 2:
        return frequencies, 1.0
    return frequencies, math.sqrt(1 + math.log(stretch) / math.log(config.max_positions))


def _proportional(config: RotaryConfig) -> tuple[Tensor, float]:
    """Keep the first ``partial_rotary_factor`` of the frequencies and set the others to 0."""
    fraction = _number(config.parameters, "partial_rotary_factor", 1.0, maximum=1.0)
    frequencies = _plain_frequencies(config) / _number(config.parameters, "factor", 1.0)
    frequencies[int(fraction * config.dim / 2) :] = 0
    return frequencies, 1.0


_FREQUENCIES: dict[str, Callable[[RotaryConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
"""For each rope type: a function that returns the frequencies ``[R / 2]`` float32 and a factor for the
cosines and sines.
"""


_MAX_NUMBER = 1e9
_MAX_BASE = 1e30


def _number(
    parameters: Mapping[str, object], name: str, default: float | None = None, *, maximum: float = _MAX_NUMBER
) -> float:
    """Return a parameter: a number above 0 and at most ``maximum``. It is required if ``default`` is None."""
    value = parameters.get(name)
    if value is None and default is not None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(name, f"must be a positive number, was {value!r}")
    if value > maximum:
        raise ConfigError(name, f"must be at most {maximum:g}, was {value!r}")
    return float(value)
