"""StableLM (Bellagente et al. 2024, arXiv:2402.17834): layer norms, RoPE in a part of each head."""

from __future__ import annotations

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
    check_head_dim,
    gated_mlps,
    layer_norms,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class StableLmModel(TransformerModel):
    """Reads the configuration of StableLM and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        check_head_dim(config)
        return Blueprint.from_huggingface(
            config,
            default_partial_rotary_factor=0.25,
            names=TensorNames(query_norm="q_layernorm", key_norm="k_layernorm"),
            norm_eps=config.number("layer_norm_eps", 1e-5),
            head_norms="together" if config.flag("qk_layernorm") else None,
            qkv_bias=config.flag("use_qkv_bias"),
        )

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        dim = blueprint.head_dim

        def head_norms(name: str, size: int) -> LayerNorm:
            """Read the layer norms of all heads as one norm with weights ``[H, D]``."""
            weights = [load.tensor(f"{name}.norms.{head}.weight", dim) for head in range(size // dim)]
            weight = torch.stack(weights)
            return LayerNorm(weight, torch.zeros_like(weight), blueprint.norm_eps)

        return BlockParts(
            attentions(load, blueprint, norm=head_norms),
            gated_mlps(load, blueprint),
            layer_norms(load, blueprint),
        )

    @classmethod
    def block(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig, parts: BlockParts
    ) -> LoadBlock:
        if not huggingface_config.flag("use_parallel_residual"):
            return super().block(load, blueprint, huggingface_config, parts)
        return lambda layer: ParallelBlock.load(load, blueprint, layer, parts)
