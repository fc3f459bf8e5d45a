"""ERNIE 4.5 (ERNIE Team, Baidu 2025, ERNIE 4.5 Technical Report): Llama with interleaved RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.nn import Blueprint, interleaved

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Ernie45Model(TransformerModel):
    """Reads the configuration of ERNIE 4.5 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        if config.number("compression_ratio", 1.0) != 1.0:
            raise ConfigError("compression_ratio", f"must be 1, was {config['compression_ratio']!r}")
        bias = config.flag("use_bias")
        return interleaved(
            Blueprint.from_huggingface(
                config,
                default_head_dim=_head_dim(config),
                default_tied_head=True,
                default_rope_theta=500_000.0,
                norm_eps=config.number("rms_norm_eps", 1e-5),
                qkv_bias=bias,
                output_bias=bias,
                mlp_bias=bias,
            )
        )


def _head_dim(config: HuggingFaceConfig) -> int | None:
    """Return 128 if ``head_dim`` is absent, else None. A null ``head_dim`` then means hidden size / heads."""
    return None if "head_dim" in config else 128
