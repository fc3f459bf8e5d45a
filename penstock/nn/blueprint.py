"""`Blueprint`: sizes and options of a Llama-like decoder, read from a checkpoint's ``config.json``.

Many families differ from Llama in a few options. Each option is a field here with Llama's value as the
default. A family with other differences defines its own blocks, see ``docs/adding-a-model.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypedDict, Unpack

from penstock.errors import ConfigError
from penstock.kernels import Activation
from penstock.nn.config_values import ConfigValues
from penstock.nn.rotary import RotaryConfig
from penstock.nn.tensor_names import LLAMA_NAMES, TensorNames

MAX_LAYERS = 10_000
"""Maximum number of layers; a larger number in a configuration is an error."""

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Activation functions by their names in checkpoints."""

FULL = "full_attention"
"""The type of a layer without a window: a token attends to itself and all tokens before it."""
SLIDING = "sliding_attention"
"""The type of a layer with a window of W tokens: a token attends to the last W tokens, including itself."""

BlockNorms: TypeAlias = Literal["before", "after", "around"]
HeadNorms: TypeAlias = Literal["each", "together"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Sizes and options of a decoder-only transformer."""

    vocab_size: int  # V
    hidden: int  # E, the hidden size
    inner: int  # F, the intermediate size of feed-forward layers
    layers: int  # L
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    norm_eps: float
    activation: Activation
    tied_head: bool
    max_length: int
    """Length in tokens of the longest sequence that the checkpoint supports."""

    rotaries: tuple[RotaryConfig, ...]
    rotary_indices: tuple[int | None, ...]  # [L]
    """The index of each layer's rotary embedding; None for a layer without RoPE."""
    windows: tuple[int | None, ...]  # [L]
    """The maximum number of keys that a query of the layer sees, including its own; None for no maximum."""

    attention_scale: float
    attention_soft_cap: float | None = None
    has_sinks: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: HeadNorms | None = None
    """The weights of the norms of queries and keys: D weights that all heads share (``each``), or weights for
    the dims of all heads (``together``); None without norms.
    """
    block_norms: BlockNorms = "before"
    """Whether attention and feed-forward layer each have a norm before, after, or on both sides (around)."""
    norm_offset: float = 0.0
    """The number added to the stored weights of norms."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Scale of each layer's output before it is added to the residual stream."""
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    names: TensorNames = LLAMA_NAMES

    @classmethod
    def from_huggingface(
        cls,
        config: ConfigValues,
        *,
        default_head_dim: int | None = None,
        activation_key: str | None = "hidden_act",
        default_activation: str = "silu",
        default_rope_theta: float = 10000.0,
        rope_parameters: Mapping[str, object] | None = None,
        default_partial_rotary_factor: float | None = None,
        default_tied_head: bool = False,
        windows: tuple[int | None, ...] | None = None,
        **fields: Unpack[BlueprintFields],
    ) -> Blueprint:
        """Read a ``config.json`` with the usual key names.

        Args:
            config: the checkpoint's configuration, a `HuggingFaceConfig`.
            default_head_dim: the family's default head size; None for hidden size / heads.
            activation_key: the key of the activation function; None if the family has no such key.
            default_activation: the family's activation function, used if the file has none.
            default_rope_theta: the family's base of the rotary embedding, used if the file has none.
            rope_parameters: parameters of the rotary embedding, used instead of the parameters in the file.
            default_partial_rotary_factor: the family's default for ``partial_rotary_factor``; None if the
                family has no such key.
            default_tied_head: the family's default for ``tie_word_embeddings``.
            windows: the window of each layer. By default no layer has a window, and `SLIDING` in
                ``layer_types`` is an error.
            **fields: further fields of the blueprint, which replace the defaults and the values of the file.

        Raises:
            ConfigError: the kv heads do not divide the heads, the activation or rope type is unknown, or
                ``windows`` is None and ``layer_types`` is invalid or contains `SLIDING`.
            CheckpointError: a size is missing or has an invalid value.
        """
        hidden = config.integer("hidden_size")
        layers = num_layers(config)
        heads = config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", default=heads)
        head_dim = config.integer("head_dim", default=default_head_dim or max(1, hidden // heads))
        if heads % kv_heads:
            raise ConfigError(
                "num_key_value_heads", f"{kv_heads} kv heads do not divide {heads} attention heads"
            )
        if windows is None:
            windows = (None,) * layers
            if SLIDING in layer_types(config, (FULL,) * layers):
                raise ConfigError("layer_types", f"has {SLIDING}, which this family does not have")
        if "rotaries" not in fields:
            rotary = RotaryConfig.from_huggingface(
                config,
                head_dim,
                default_rope_theta=default_rope_theta,
                parameters=rope_parameters,
                supports_partial=default_partial_rotary_factor is not None,
                default_fraction=1.0
                if default_partial_rotary_factor is None
                else default_partial_rotary_factor,
            )
            fields = {"max_length": rotary.max_length, "rotaries": (rotary,), **fields}
        values: BlueprintFields = {
            "norm_eps": config.number("rms_norm_eps", 1e-6),
            "attention_scale": head_dim**-0.5,
            "rotary_indices": (0,) * layers,
            **fields,
        }
        # A window of at least max_length tokens hides no key. Without the window, the layer can share a cache
        # group with the layers of full attention.
        max_length = values["max_length"]
        effective_windows = (None if window and window >= max_length else window for window in windows)
        return cls(
            vocab_size=config.integer("vocab_size"),
            hidden=hidden,
            inner=config.integer("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            activation=_activation(config, activation_key, default_activation),
            tied_head=config.flag("tie_word_embeddings", default_tied_head),
            windows=tuple(effective_windows),
            **values,
        )


class BlueprintFields(TypedDict, total=False):
    """The fields of a `Blueprint` that `Blueprint.from_huggingface` accepts as keyword arguments."""

    norm_eps: float
    max_length: int
    rotaries: tuple[RotaryConfig, ...]
    rotary_indices: tuple[int | None, ...]
    attention_scale: float
    attention_soft_cap: float | None
    has_sinks: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: HeadNorms | None
    block_norms: BlockNorms
    norm_offset: float
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_soft_cap: float | None
    names: TensorNames


def _activation(config: ConfigValues, key: str | None, default: str) -> Activation:
    if key is None:
        return activation_named(default, "hidden_act")
    return activation_named(config.get(key) or default, key)


def interleaved(blueprint: Blueprint) -> Blueprint:
    """Return the blueprint with rotary embeddings that rotate the pairs (2 i, 2 i + 1) of a head."""
    return replace(
        blueprint, rotaries=tuple(replace(rotary, is_interleaved=True) for rotary in blueprint.rotaries)
    )


def check_head_dim(config: ConfigValues) -> None:
    """Check that ``head_dim`` is absent or hidden size / heads. For families that do not read this key.

    Raises:
        ConfigError: ``head_dim`` has another value.
    """
    size = config.integer("hidden_size") // config.integer("num_attention_heads")
    if config.get("head_dim") not in (None, size):
        raise ConfigError(
            "head_dim",
            f"is {config.get('head_dim')!r}, but heads have {size} dims in this family, "
            "hidden_size / num_attention_heads",
        )


def num_layers(config: ConfigValues) -> int:
    """Return L, the number of layers."""
    return config.integer("num_hidden_layers", maximum=MAX_LAYERS)


def activation_named(name: object, key: str) -> Activation:
    """Return the activation function for a name in a ``config.json``.

    Args:
        name: the name.
        key: the key of the name, for the error message.

    Raises:
        ConfigError: the name is unknown.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(key, f"{name!r} is not known: use {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def layer_types(config: ConfigValues, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the type of each layer, `FULL` or `SLIDING`, from the key ``layer_types``: ``[L]``.

    Args:
        config: the checkpoint's configuration.
        default: the types if the key is absent, ``[L]``.

    Raises:
        ConfigError: the value is not a list of L known names.
    """
    types = config.get("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != len(default):
        raise ConfigError("layer_types", f"must be a list of {len(default)} names, was {types!r}")
    unknown_types = [name for name in types if name not in (FULL, SLIDING)]
    if unknown_types:
        raise ConfigError("layer_types", f"{unknown_types[0]!r} is not known: use {FULL} or {SLIDING}")
    return tuple(types)


def layer_windows(
    config: ConfigValues, types: tuple[str, ...], default: int, *, has_windows: bool = True
) -> tuple[int | None, ...]:
    """Return the window of each layer: ``sliding_window`` for type `SLIDING`, None for type `FULL`.

    Args:
        config: the checkpoint's configuration.
        types: the type of each layer, ``[L]``.
        default: the family's window if the key is absent.
        has_windows: whether the configuration switches windows on, for example by ``use_sliding_window``.

    Raises:
        ConfigError: a layer is of type `SLIDING`, and ``sliding_window`` is null or ``has_windows`` is False.
    """
    if SLIDING not in types:
        return (None,) * len(types)
    if not has_windows:
        raise ConfigError("use_sliding_window", f"must be true, because some layers have the type {SLIDING}")
    size = config.optional_integer("sliding_window", default)
    if size is None:
        raise ConfigError("sliding_window", f"must be a number, because some layers have the type {SLIDING}")
    return tuple(size if kind == SLIDING else None for kind in types)


def uniform_windows(config: ConfigValues, default: int | None = None) -> tuple[int | None, ...]:
    """Return the window of each layer, for families where all layers have the same window.

    The window is the value of ``sliding_window``; None for null, and ``default`` if the key is absent.

    Raises:
        ConfigError: ``layer_types`` contradicts ``sliding_window``.
    """
    kind = FULL if config.optional_integer("sliding_window", default) is None else SLIDING
    types = (kind,) * num_layers(config)
    if layer_types(config, types) != types:
        raise ConfigError(
            "layer_types", f"must all be {kind}, because sliding_window applies to all layers in this family"
        )
    return layer_windows(config, types, default or 1)
