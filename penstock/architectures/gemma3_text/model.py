"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786): Gemma 2 with norms of queries and keys instead of caps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.gemma2.model import gemma_defaults
from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.nn import FULL, SLIDING, Blueprint, RotaryConfig, layer_types, num_layers, windows_of

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Gemma3TextModel(TransformerModel):
    """Gemma 3 as a pipeline model."""

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
        return Blueprint.from_huggingface(
            config,
            **gemma_defaults(config),
            logit_soft_cap=config.optional_number("final_logit_softcapping"),
            head_norms="each",
            windows=windows_of(config, types, 4096),
            max_length=config.integer("max_position_embeddings"),  # already includes the rope extension
            rotaries=_rotaries(config),
            rotary_of_layer=tuple(_ROTARIES.index(kind) for kind in types),
        )


_ROTARIES = (FULL, SLIDING)


def _rotaries(config: HuggingFaceConfig) -> tuple[RotaryConfig, ...]:
    """Return the rotary embeddings of both layer types, from newer or older files."""
    given = config.section("rope_parameters")
    if set(given) - set(_ROTARIES):
        raise ConfigError("rope_parameters", f"must hold {' and '.join(_ROTARIES)}, holds {', '.join(given)}")
    older: dict[str, dict[str, object]] = {
        FULL: {"rope_theta": config.number("rope_theta", 1_000_000.0)} | dict(config.section("rope_scaling")),
        SLIDING: {"rope_theta": config.number("rope_local_base_freq", 10_000.0)},
    }
    head_dim = config.integer("head_dim", 256)
    return tuple(
        RotaryConfig.from_huggingface(
            config,
            head_dim,
            parameters=older[kind] | dict(given.section(kind)),
            supports_partial=False,
        )
        for kind in _ROTARIES
    )
