"""OLMo 3 (Team OLMo 2025, arXiv:2512.13961): OLMo 2 with windows in three of every four layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import (
    FULL,
    SLIDING,
    Blueprint,
    layer_types,
    layer_windows,
    num_layers,
    rotary_configs_by_type,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Olmo3Model(TransformerModel):
    """Reads the configuration of OLMo 3 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        default = tuple(SLIDING if (layer + 1) % 4 else FULL for layer in range(num_layers(config)))
        types = layer_types(config, default)
        attention_bias = config.flag("attention_bias")
        bases = {FULL: config.number("rope_theta", _ROPE_THETA), SLIDING: _ROPE_THETA}
        rotaries = rotary_configs_by_type(config, _head_dim(config), bases)
        return Blueprint.from_huggingface(
            config,
            norm_eps=config.number("rms_norm_eps", 1e-5),
            block_norms="after",
            head_norms="together",
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            windows=layer_windows(config, types, 4096),
            max_length=config.integer("max_position_embeddings"),
            rotaries=tuple(rotaries.values()),
            rotary_indices=tuple(list(rotaries).index(kind) for kind in types),
        )


def _head_dim(config: HuggingFaceConfig) -> int:
    heads = config.integer("num_attention_heads")
    return config.integer("head_dim", max(1, config.integer("hidden_size") // heads))


_ROPE_THETA = 500_000.0
