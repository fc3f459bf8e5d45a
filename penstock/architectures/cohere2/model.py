"""Command R7B (model card of CohereLabs/c4ai-command-r7b-12-2024): Command R with sliding windows.

Layers without a window have no RoPE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.architectures.cohere.model import CohereModel, cohere_blueprint
from penstock.errors import ConfigError
from penstock.nn import FULL, SLIDING, Blueprint, layer_types, layer_windows, num_layers

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Cohere2Model(CohereModel):
    """Reads the configuration of Command R7B and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        if config.flag("use_qk_norm"):
            raise ConfigError("use_qk_norm", "is true: this family has no norms of queries and keys")
        period = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 4))
        default = tuple(SLIDING if (layer + 1) % period else FULL for layer in range(num_layers(config)))
        types = layer_types(config, default)
        blueprint = cohere_blueprint(
            config,
            default_head_dim=None if "head_dim" in config else 128,
            windows=layer_windows(config, types, 4096),
        )
        return replace(blueprint, rotary_indices=tuple(0 if kind == SLIDING else None for kind in types))
