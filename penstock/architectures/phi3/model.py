"""Phi 3 (Abdin et al. 2024, arXiv:2404.14219): Llama with fused weights, a window and LongRoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import Blueprint, TensorNames, rope_values, uniform_windows

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Phi3Model(TransformerModel):
    """Reads the configuration of Phi 3 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        return Blueprint.from_huggingface(
            config,
            rope_parameters=_rope_parameters(config),
            default_partial_rotary_factor=1.0,
            names=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
            norm_eps=config.number("rms_norm_eps", 1e-5),
            windows=uniform_windows(config),
        )


def _rope_parameters(config: HuggingFaceConfig) -> dict[str, object]:
    """Return the RoPE parameters. In early ``config.json`` files, LongRoPE is called ``su`` or ``yarn``."""
    parameters = rope_values(config)
    if parameters.get("rope_type", parameters.get("type")) in ("su", "yarn"):
        parameters["rope_type"] = "longrope"
    return parameters
