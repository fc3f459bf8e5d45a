"""Phi 1 to 2 (Gunasekar et al. 2023, arXiv:2306.11644): parallel attention and MLP, biases, partial RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import (
    BlockParts,
    Blueprint,
    LoadBlock,
    Loader,
    ParallelBlock,
    TensorNames,
    attentions,
    check_head_dim,
    layer_norms,
    plain_mlps,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


_NAMES = TensorNames(
    norm="final_layernorm",
    output="dense",
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    gate_up=("fc1",),
    down="fc2",
)


class PhiModel(TransformerModel):
    """Reads the configuration of Phi and builds its network."""

    head_bias = True

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        check_head_dim(config)
        return Blueprint.from_huggingface(
            config,
            default_activation="gelu_new",
            default_partial_rotary_factor=0.5,
            names=_NAMES,
            norm_eps=config.number("layer_norm_eps", 1e-5),
            head_norms="each" if config.flag("qk_layernorm") else None,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
        )

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        norms = layer_norms(load, blueprint)
        return BlockParts(attentions(load, blueprint, norm=norms), plain_mlps(load, blueprint), norms)

    @classmethod
    def block(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig, parts: BlockParts
    ) -> LoadBlock:
        return lambda layer: ParallelBlock.load(load, blueprint, layer, parts)
