"""Ministral 3 (model card of mistralai/Ministral-3-8B-Instruct-2512): Mistral with scaled queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.kernels import StepInputs
from penstock.nn import (
    Attention,
    BlockParts,
    Blueprint,
    DecoderNetwork,
    Loader,
    Rotary,
    RotaryConfig,
    RotaryRows,
    attentions,
    llama_parts,
    rope_values,
    uniform_windows,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class QueryRotary(Rotary):
    """The rotary tables of queries, scaled by ``1 + beta * ln(1 + floor(position / period))``."""

    def __init__(
        self, config: RotaryConfig, max_length: int, device: torch.device, beta: float, period: int
    ) -> None:
        super().__init__(config, max_length, device)
        positions = torch.arange(len(self.cos), device=device)
        scale = 1 + beta * torch.log1p((positions // period).float())  # [P]
        self.cos, self.sin = self.cos * scale[:, None], self.sin * scale[:, None]


@dataclass(frozen=True, slots=True)
class Ministral3Attention(Attention):
    """Attention with separate rotary embeddings for keys and queries."""

    def _rotate(
        self, q: Tensor, k: Tensor, rows: Sequence[RotaryRows], step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        key_rows, query_rows = rows
        q, _ = step.ops.rotary(q, k[:, :0], *query_rows, is_interleaved=self.is_interleaved)
        k, _ = step.ops.rotary(k, q[:, :0], *key_rows, is_interleaved=self.is_interleaved)
        return q, k


class Ministral3Model(TransformerModel):
    """Reads the configuration of Ministral 3 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        return Blueprint.from_huggingface(
            config,
            default_head_dim=None if "head_dim" in config else 128,
            norm_eps=config.number("rms_norm_eps", 1e-5),
            windows=uniform_windows(config),
        )

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        return replace(
            llama_parts(load, blueprint), attention=attentions(load, blueprint, Ministral3Attention)
        )

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> DecoderNetwork:
        network = super().build(load, huggingface_config, max_length)
        assert isinstance(network, DecoderNetwork)
        (rotary,) = network.rotaries
        beta, period = _query_scale(huggingface_config)
        queries = QueryRotary(rotary.config, max_length, load.device, beta, period)
        return replace(network, rotaries=(rotary, queries))


def _query_scale(config: HuggingFaceConfig) -> tuple[float, int]:
    """Return the parameters of `QueryRotary`: beta, and the period in positions."""
    values = rope_values(config)
    beta = values.get("llama_4_scaling_beta", 0.0)
    period = values.get("original_max_position_embeddings", config.integer("max_position_embeddings"))
    if isinstance(beta, bool) or not isinstance(beta, int | float) or beta < 0:
        raise ConfigError(
            "rope_parameters.llama_4_scaling_beta", f"must be a number of at least 0, was {beta!r}"
        )
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        key = "rope_parameters.original_max_position_embeddings"
        raise ConfigError(key, f"must be a whole number of at least 1, was {period!r}")
    return float(beta), period
