"""SmolLM 3: Llama in which some layers have no RoPE (Yang et al. 2025, arXiv:2501.18795)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.nn import FULL, SLIDING, Blueprint, layer_types, layer_windows, num_layers

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class SmolLM3Model(TransformerModel):
    """Reads the configuration of SmolLM 3 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        has_rope = _rope_layers(config)
        has_window = (
            config.flag("use_sliding_window") and config.optional_integer("sliding_window") is not None
        )
        default = tuple(SLIDING if has_window and not rope else FULL for rope in has_rope)
        types = layer_types(config, default)
        attention_bias = config.flag("attention_bias")
        return Blueprint.from_huggingface(
            config,
            default_rope_theta=2_000_000.0,
            default_tied_head=True,
            rotary_indices=tuple(0 if rope else None for rope in has_rope),
            windows=layer_windows(config, types, 1, has_windows=has_window),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=config.flag("mlp_bias"),
        )


def _rope_layers(config: HuggingFaceConfig) -> tuple[bool, ...]:  # [L]
    """Return for each layer whether it has RoPE. In ``no_rope_layers``, 1 means RoPE and 0 means no RoPE.

    Without this list, every n-th layer has no RoPE; n is ``no_rope_layer_interval``.

    Raises:
        ConfigError: ``no_rope_layers`` has too few entries, or an entry other than 0 and 1.
    """
    layers = num_layers(config)
    flags = config.integers("no_rope_layers")
    if flags is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise ConfigError("no_rope_layers", f"must be a list of {layers} zeros and ones, was {list(flags)}")
    return tuple(bool(flag) for flag in flags[:layers])
