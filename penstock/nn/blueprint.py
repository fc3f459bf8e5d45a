"""What a decoder is made of, in numbers: `Blueprint`, read from a checkpoint's ``config.json``.

The families that came after Llama differ from it in a handful of places. Each place is a field here whose
default is Llama's way, so that an architecture is a blueprint with its own few fields said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.kernels import Activation
from penstock.nn.rotary import RotaryConfig

_MAX_LAYERS = 10_000

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Activations by the names that checkpoints call them."""

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Sizes and ways of a decoder-only transformer."""

    vocabulary: int  # V
    hidden: int  # E
    inner: int  # F
    layers: int  # L
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    norm_eps: float
    activation: Activation
    tied_head: bool
    max_length: int
    """The longest text that the checkpoint is made for."""

    rotaries: tuple[RotaryConfig, ...]
    rotary_of_layer: tuple[int | None, ...]  # [L]
    """Which of the rotary embeddings a layer uses; None: it has no notion of positions."""
    windows: tuple[int | None, ...]  # [L]
    """How many keys a query of the layer sees, itself included; None: all."""

    attention_scale: float
    attention_soft_cap: float | None = None
    sinks: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: Literal["each", "together"] | None = None
    """Norms of queries and keys before the rotation: of each head, or of all heads together."""
    block_norms: Literal["before", "after", "around"] = "before"
    """Where norms stand about attention and feed-forward layer."""
    norm_offset: float = 0.0
    """What norms' weights are stored less of."""
    fused_weights: bool = False
    """Whether the checkpoint holds ``qkv_proj`` and ``gate_up_proj`` in place of their parts."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what each layer adds."""
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None

    @classmethod
    def from_huggingface(
        cls,
        config: Any,
        *,
        head_dim: int | None = None,
        activation: str = "hidden_act",
        default_activation: str = "silu",
        default_base: float = 10000.0,
        rope_parameters: Mapping[str, Any] | None = None,
        partial_rotary: bool = False,
        tied_head: bool = False,
        windows: tuple[int | None, ...] | None = None,
        **ways: Any,
    ) -> Blueprint:
        """Reads a ``config.json`` that spells sizes the way most families do.

        Args:
            config: the checkpoint's configuration, a `HuggingFaceConfig`.
            head_dim: where the file gives none, the family's default; E / H if there is none either.
            activation: the key that the activation stands under.
            default_activation: the family's, where the file names none.
            default_base: the family's base of the rotary embedding.
            rope_parameters: in place of those in the file.
            partial_rotary: whether the family honours ``partial_rotary_factor``.
            tied_head: the family's default for ``tie_word_embeddings``.
            windows: of each layer; if not given there are none, nor may ``layer_types`` have any.
            ways: other fields, in place of their defaults or of what is read.

        Raises:
            ConfigError: heads that do not divide, an activation or a type of rope that is not known, windows
                in a family without.
            CheckpointError: a size is missing, or no size.
        """
        hidden = config.count("hidden_size")
        layers = num_layers(config)
        heads = config.count("num_attention_heads")
        kv_heads = config.count("num_key_value_heads", default=heads)
        head_dim = config.count("head_dim", default=head_dim or max(1, hidden // heads))
        if heads % kv_heads:
            raise ConfigError(
                "num_key_value_heads", f"{kv_heads} kv heads do not divide {heads} attention heads"
            )
        if windows is None:
            windows = (None,) * layers
            if SLIDING in layer_types(config, (FULL,) * layers):
                raise ConfigError("layer_types", f"has {SLIDING}, which this family does not have")
        if "rotaries" not in ways:
            rotary = RotaryConfig.from_huggingface(
                config,
                head_dim,
                default_base=default_base,
                parameters=rope_parameters,
                supports_partial=partial_rotary,
            )
            ways = {"max_length": rotary.max_length, "rotaries": (rotary,)} | ways
        values: dict[str, Any] = {
            "norm_eps": config.positive("rms_norm_eps", 1e-6),
            "attention_scale": head_dim**-0.5,
            "rotary_of_layer": (0,) * layers,
        } | ways
        # A window that no text outgrows is none: its blocks need no freeing.
        fitting = (None if window and window >= values["max_length"] else window for window in windows)
        return cls(
            vocabulary=config.count("vocab_size"),
            hidden=hidden,
            inner=config.count("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            activation=activation_named(config.get(activation) or default_activation, activation),
            tied_head=config.flag("tie_word_embeddings", tied_head),
            windows=tuple(fitting),
            **values,
        )


def num_layers(config: Any) -> int:
    """L, of a `HuggingFaceConfig`."""
    layers: int = config.count("num_hidden_layers", most=_MAX_LAYERS)
    return layers


def activation_named(name: object, key: str) -> Activation:
    """The activation that checkpoints call ``name``.

    Raises:
        ConfigError: it is not known; names the key that it stands under.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(key, f"{name!r} is not known: use {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def layer_types(config: Any, default: tuple[str, ...]) -> tuple[str, ...]:
    """``layer_types`` ``[L]`` of a `HuggingFaceConfig`, each full or sliding attention.

    Raises:
        ConfigError: it is no list of L such names.
    """
    given = config.get("layer_types")
    if given is None:
        return default
    if not isinstance(given, list) or len(given) != len(default):
        raise ConfigError("layer_types", f"must be a list of {len(default)} names, was {given!r}")
    unknown = [name for name in given if name not in (FULL, SLIDING)]
    if unknown:
        raise ConfigError("layer_types", f"{unknown[0]!r} is not known: use {FULL} or {SLIDING}")
    return tuple(given)


def windows_of(
    config: Any, types: tuple[str, ...], default: int, *, is_used: bool = True
) -> tuple[int | None, ...]:
    """The window of each layer: ``sliding_window`` where its type is sliding attention.

    Args:
        config: a `HuggingFaceConfig`.
        types: of each layer, ``[L]``.
        default: the family's window where the key is absent.
        is_used: what ``use_sliding_window`` says, in families that have it.

    Raises:
        ConfigError: a layer is of sliding attention, and the window is null or not to be used.
    """
    if SLIDING not in types:
        return (None,) * len(types)
    if not is_used:
        raise ConfigError("use_sliding_window", f"is not true, and some layers are of {SLIDING}")
    if config.get("sliding_window", default) is None:
        raise ConfigError("sliding_window", f"is null, and some layers are of {SLIDING}")
    size = config.count("sliding_window", default)
    return tuple(size if kind == SLIDING else None for kind in types)


def same_windows(config: Any, default: int | None = None) -> tuple[int | None, ...]:
    """``sliding_window`` for every layer, in families whose layers are all alike; null is none.

    Raises:
        ConfigError: ``layer_types`` says something else.
    """
    kind = FULL if config.get("sliding_window", default) is None else SLIDING
    types = (kind,) * num_layers(config)
    if layer_types(config, types) != types:
        raise ConfigError("layer_types", f"must all be {kind}, as sliding_window says in this family")
    return windows_of(config, types, default or 1)
