"""The settings of Gemma 4's layers, read from ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.nn import FULL, SLIDING, RotaryConfig, layer_types, num_layers

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

LAYER_TYPES = (FULL, SLIDING)
"""The layer types. A layer's rotary embedding has the index of the layer's type."""
_ROPE_DEFAULTS: dict[str, dict[str, object]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_SLIDING_LAYERS_PER_FULL = 5


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The settings of the attention of one layer."""

    layer_type: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    """The maximum number of keys that a query sees, including its own key; None for no maximum."""
    cache_layer: int
    """The index in the KV cache of the layer's keys and values."""
    is_kv_shared: bool
    """Whether the layer reads the keys and values that an earlier layer has stored."""
    are_values_keys: bool
    """Whether values are computed from the output of the key projection."""

    @property
    def rotary_index(self) -> int:
        """The index of the layer's rotary embedding."""
        return LAYER_TYPES.index(self.layer_type)

    @property
    def cache_options(self) -> tuple[int, int, int | None]:
        """The number of kv heads, the head size and the window. They are equal in a group of the KV cache."""
        return self.kv_heads, self.head_dim, self.window


def layer_configs(config: HuggingFaceConfig) -> tuple[LayerConfig, ...]:
    """Return the settings of the attention of each layer, ``[L]``.

    The last ``num_kv_shared_layers`` layers have no keys and values. Each of them reads the keys and values
    of the last layer before them that has the same type.

    Raises:
        ConfigError: kv heads do not divide the heads, or a layer cannot read keys and values of another
            layer.
        CheckpointError: a value is missing or invalid.
    """
    types = gemma4_layer_types(config)
    num_own = len(types) - _num_shared(config, types)
    max_length, window = config.integer("max_position_embeddings"), config.integer("sliding_window", 512)
    effective_window = None if window >= max_length else window
    layers: list[LayerConfig] = []
    for layer, layer_type in enumerate(types):
        heads, kv_heads, head_dim = _head_sizes(config, layer, layer_type)
        is_shared = layer >= num_own
        source = _last_index(types[:num_own], layer_type) if is_shared else layer
        layer_config = LayerConfig(
            layer_type,
            heads,
            kv_heads,
            head_dim,
            effective_window if layer_type == SLIDING else None,
            source,
            is_shared,
            layer_type == FULL and config.flag("attention_k_eq_v"),
        )
        if is_shared and layers[source].cache_options != layer_config.cache_options:
            raise ConfigError(
                "num_kv_shared_layers",
                f"layer {layer} reads the keys of layer {source}, but its heads have other sizes",
            )
        layers.append(layer_config)
    return tuple(layers)


def rotary_configs(config: HuggingFaceConfig, layers: tuple[LayerConfig, ...]) -> tuple[RotaryConfig, ...]:
    """Return the configuration of the rotary embedding of each type in `LAYER_TYPES`.

    A type that does not occur in the model gets the head size of the last layer.
    """
    section = config.section("rope_parameters")
    if set(section) - set(LAYER_TYPES):
        raise ConfigError(
            "rope_parameters",
            f"may only contain {' and '.join(LAYER_TYPES)}, contains {', '.join(section)}",
        )
    rotaries = []
    for layer_type in LAYER_TYPES:
        head_dim = next((layer.head_dim for layer in layers if layer.layer_type == layer_type), None)
        parameters = section.section(layer_type).to_dict() or _ROPE_DEFAULTS[layer_type]
        rotaries.append(
            RotaryConfig.from_huggingface(
                config,
                head_dim or layers[-1].head_dim,
                default_rope_theta=float(str(_ROPE_DEFAULTS[layer_type]["rope_theta"])),
                parameters=parameters,
                supports_partial=False,
            )
        )
    return tuple(rotaries)


def gemma4_layer_types(config: HuggingFaceConfig) -> tuple[str, ...]:
    """Return the type of each layer. The last layer always has full attention."""
    period = _SLIDING_LAYERS_PER_FULL + 1
    default = tuple(FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers(config)))
    return (*layer_types(config, default)[:-1], FULL)


def layer_head_sizes(
    config: HuggingFaceConfig, layer: int, default_kv_heads: int, default_head_dim: int
) -> tuple[int, int, int]:
    """Return the number of heads, the number of kv heads and the head size of a layer.

    The defaults apply to sizes that ``per_layer_config`` does not contain for the layer.

    Raises:
        ConfigError: the kv heads do not divide the heads.
        CheckpointError: a value is missing or invalid.
    """
    heads, section = config.integer("num_attention_heads"), config.layer_section(layer)
    kv_heads = section.integer("num_key_value_heads", default_kv_heads)
    if heads % kv_heads:
        raise ConfigError(
            "num_key_value_heads", f"{kv_heads} kv heads do not divide {heads} heads of layer {layer}"
        )
    return heads, kv_heads, section.integer("head_dim", default_head_dim)


def _last_index(types: tuple[str, ...], layer_type: str) -> int:
    """Return the index of the last layer of a type."""
    return len(types) - 1 - types[::-1].index(layer_type)


def _num_shared(config: HuggingFaceConfig, types: tuple[str, ...]) -> int:
    """Return the number of layers without keys and values."""
    num_shared = config.integer("num_kv_shared_layers", 0, minimum=0)
    if not set(types) <= set(types[: len(types) - num_shared]):
        raise ConfigError(
            "num_kv_shared_layers",
            f"is {num_shared}: the first {max(0, len(types) - num_shared)} layers have to contain a layer "
            "of each type in layer_types",
        )
    return num_shared


def _head_sizes(config: HuggingFaceConfig, layer: int, layer_type: str) -> tuple[int, int, int]:
    """Return the number of heads, the number of kv heads and the head size of a layer.

    Recent versions of transformers save sizes that differ between layers in ``per_layer_config``. Older
    checkpoints have them in ``global_head_dim`` and ``num_global_key_value_heads``.
    """
    kv_heads, head_dim = config.integer("num_key_value_heads", 4), config.integer("head_dim", 256)
    if "per_layer_config" not in config and layer_type == FULL:
        head_dim = config.integer("global_head_dim", 512)
        if config.flag("attention_k_eq_v"):
            kv_heads = config.integer("num_global_key_value_heads", kv_heads)
    return layer_head_sizes(config, layer, kv_heads, head_dim)
