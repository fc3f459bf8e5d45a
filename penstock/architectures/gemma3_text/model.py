"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786): Gemma 2 with q and k norms, no attention soft cap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.gemma2.model import gemma_defaults
from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
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


class Gemma3TextModel(TransformerModel):
    """Reads the configuration of Gemma 3 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        if config.get("attn_logit_softcapping") is not None:
            raise ConfigError(
                "attn_logit_softcapping", "must be null: this family has no cap on attention scores"
            )
        pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
        default = tuple(SLIDING if (i + 1) % pattern else FULL for i in range(num_layers(config)))
        types = layer_types(config, default)
        bases = {
            FULL: config.number("rope_theta", 1_000_000.0),
            SLIDING: config.number("rope_local_base_freq", 10_000.0),
        }
        rotaries = rotary_configs_by_type(config, config.integer("head_dim", 256), bases)
        return Blueprint.from_huggingface(
            config,
            **gemma_defaults(config),
            logit_soft_cap=config.optional_number("final_logit_softcapping"),
            head_norms="each",
            windows=layer_windows(config, types, 4096),
            max_length=config.integer("max_position_embeddings"),  # already multiplied by the RoPE factor
            rotaries=tuple(rotaries.values()),
            rotary_indices=tuple(list(rotaries).index(kind) for kind in types),
        )
