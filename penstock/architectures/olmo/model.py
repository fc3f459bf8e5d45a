"""OLMo (Groeneveld et al. 2024, arXiv:2402.00838): norms without weights, optionally clipped QKV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.architectures.transformer import TransformerModel
from penstock.kernels import StepInputs
from penstock.nn import (
    Attention,
    BlockParts,
    Blueprint,
    LayerNorm,
    Linear,
    Loader,
    LoadNorm,
    attentions,
    gated_mlps,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class ClippedLinear(Linear):
    """A linear layer whose outputs are clamped to the range from ``-limit`` to ``limit``."""

    limit: float

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        y = step.ops.linear(x, self.packed, lora=step.lora)
        return step.ops.clamp(y, -self.limit, self.limit)


def unweighted_norms(load: Loader) -> LoadNorm:
    """Return a function that creates layer norms with weights of 1 and biases of 0."""

    def create_norm(name: str, size: int) -> LayerNorm:
        weight = torch.ones(size, dtype=load.dtype, device=load.device)
        return LayerNorm(weight, torch.zeros_like(weight), _NORM_EPS)

    return create_norm


class OlmoModel(TransformerModel):
    """Reads the configuration of OLMo and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        _clip_limit(huggingface_config)  # raises an error for an invalid ``clip_qkv``
        attention_bias = huggingface_config.flag("attention_bias")
        return Blueprint.from_huggingface(
            huggingface_config, qkv_bias=attention_bias, output_bias=attention_bias
        )

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        read, limit = attentions(load, blueprint), _clip_limit(huggingface_config)

        def clipped_attention(name: str, layer: int) -> Attention:
            attention, values = read(name, layer), None
            if limit is None:
                return attention
            if attention.values is not None:
                values = ClippedLinear(attention.values.packed, limit)
            return replace(attention, qkv=ClippedLinear(attention.qkv.packed, limit), values=values)

        return BlockParts(clipped_attention, gated_mlps(load, blueprint), unweighted_norms(load))


def _clip_limit(config: HuggingFaceConfig) -> float | None:
    """Return the magnitude to which queries, keys and values are clamped; None without a limit."""
    return config.optional_number("clip_qkv")
