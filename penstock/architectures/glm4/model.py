"""GLM-4-0414 (model card of zai-org/GLM-4-9B-0414): GLM with norms before and after attention and MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.glm.model import glm_blueprint
from penstock.architectures.transformer import TransformerModel
from penstock.nn import Blueprint, TensorNames

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


_NAMES = TensorNames(
    gate_up=("gate_up_proj",), norms_after=("post_self_attn_layernorm", "post_mlp_layernorm")
)


class Glm4Model(TransformerModel):
    """Reads the configuration of GLM-4-0414 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        return glm_blueprint(huggingface_config, _NAMES, block_norms="around")
