"""Command R (model card of CohereLabs/c4ai-command-r-v01): parallel attention and feed-forward layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from penstock.architectures.transformer import TransformerModel
from penstock.nn import (
    BlockParts,
    Blueprint,
    LayerNorm,
    LoadBlock,
    Loader,
    ParallelBlock,
    TensorNames,
    attentions,
    gated_mlps,
    interleaved,
    layer_norms,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class CohereModel(TransformerModel):
    """Reads the configuration of Command R and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        blueprint = cohere_blueprint(huggingface_config, default_rope_theta=500_000.0)
        return replace(blueprint, head_norms="together" if huggingface_config.flag("use_qk_norm") else None)

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        def head_norms(name: str, size: int) -> LayerNorm:
            """Read a layer norm with separate weights for each head, ``[H, D]``, and no bias."""
            weight = load.tensor(f"{name}.weight", size // blueprint.head_dim, blueprint.head_dim)
            return LayerNorm(weight, torch.zeros_like(weight), blueprint.norm_eps)

        return BlockParts(
            attentions(load, blueprint, norm=head_norms),
            gated_mlps(load, blueprint),
            layer_norms(load, blueprint, bias=False),
        )

    @classmethod
    def block(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig, parts: BlockParts
    ) -> LoadBlock:
        return lambda layer: ParallelBlock.load(load, blueprint, layer, parts)


def cohere_blueprint(
    config: HuggingFaceConfig,
    *,
    default_head_dim: int | None = None,
    default_rope_theta: float = 10000.0,
    windows: tuple[int | None, ...] | None = None,
) -> Blueprint:
    """Return the blueprint of a family of Command models."""
    attention_bias = config.flag("attention_bias")
    return interleaved(
        Blueprint.from_huggingface(
            config,
            default_head_dim=default_head_dim,
            default_rope_theta=default_rope_theta,
            windows=windows,
            default_tied_head=True,
            norm_eps=config.number("layer_norm_eps", 1e-5),
            logit_scale=config.number("logit_scale", 0.0625),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            names=TensorNames(other_tables=("_norm.weight",)),
        )
    )
