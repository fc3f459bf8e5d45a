"""StarCoder 2 (Lozhkov et al. 2024, arXiv:2402.19173): layer norms, biases, a window, ungated MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import (
    BlockParts,
    Blueprint,
    Loader,
    TensorNames,
    attentions,
    layer_norms,
    plain_mlps,
    uniform_windows,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Starcoder2Model(TransformerModel):
    """Reads the configuration of StarCoder 2 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        bias = config.flag("use_bias", True)
        return Blueprint.from_huggingface(
            config,
            default_tied_head=True,
            default_activation="gelu_pytorch_tanh",
            names=TensorNames(gate_up=("c_fc",), down="c_proj"),
            norm_eps=config.number("norm_epsilon", 1e-5),
            windows=uniform_windows(config),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
        )

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        return BlockParts(
            attentions(load, blueprint), plain_mlps(load, blueprint), layer_norms(load, blueprint)
        )
