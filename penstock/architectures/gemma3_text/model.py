"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786): Gemma 2 with norms of heads in place of caps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.gemma2.model import gemma_defaults, optional_cap
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
            raise ConfigError("attn_logit_softcapping", "must be null: scores have no cap in this family")
        pattern = config.count("sliding_window_pattern", config.count("_sliding_window_pattern", 6))
        default = tuple(SLIDING if (i + 1) % pattern else FULL for i in range(num_layers(config)))
        types = layer_types(config, default)
        return Blueprint.from_huggingface(
            config,
            **gemma_defaults(config),
            logit_soft_cap=optional_cap(config, "final_logit_softcapping", None),
            head_norms="each",
            windows=windows_of(config, types, 4096),
            max_length=config.count("max_position_embeddings"),  # that of the stretched rope
            rotaries=_rotaries(config),
            rotary_of_layer=tuple(_ROTARIES.index(kind) for kind in types),
        )


_ROTARIES = (FULL, SLIDING)


def _rotaries(config: HuggingFaceConfig) -> tuple[RotaryConfig, ...]:
    """The rotary embeddings of both kinds of layers, from either generation of files."""
    given = config.section("rope_parameters")
    if set(given) - set(_ROTARIES):
        raise ConfigError("rope_parameters", f"must hold {' and '.join(_ROTARIES)}, holds {', '.join(given)}")
    older = {
        FULL: {"rope_theta": config.positive("rope_theta", 1_000_000.0)}
        | dict(config.section("rope_scaling")),
        SLIDING: {"rope_theta": config.positive("rope_local_base_freq", 10_000.0)},
    }
    head_dim = config.count("head_dim", 256)
    return tuple(
        RotaryConfig.from_huggingface(
            config,
            head_dim,
            parameters=older[kind] | dict(given.section(kind)),
            supports_partial=False,
        )
        for kind in _ROTARIES
    )
