"""MiniMax-M2 (MiniMax 2025): sigmoid routing with a correction bias, and partial RoPE.

One norm covers the queries of all heads, and another norm the keys of all heads. Unlike earlier MiniMax
models, this family has no linear attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.kernels import ScoreRouting
from penstock.nn import (
    Blueprint,
    Experts,
    Loader,
    LoadFeedForward,
    TensorNames,
    load_correction_bias,
    load_experts,
    load_router,
    num_experts_per_token,
    rope_values,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class MiniMaxM2Model(TransformerModel):
    """Reads the configuration of MiniMax-M2 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        _check_options(config)
        parameters = rope_values(config)
        if config.get("rotary_dim") is not None:
            fraction = config.integer("rotary_dim") / config.integer("head_dim", 128)
            parameters.setdefault("partial_rotary_factor", fraction)
        return Blueprint.from_huggingface(
            config,
            default_head_dim=128,
            default_rope_theta=5e6,
            rope_parameters=parameters,
            default_partial_rotary_factor=1.0,
            head_norms="together",
            names=_NAMES,
        )

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        config, hidden = huggingface_config, blueprint.hidden
        num_experts = config.integer("num_local_experts", config.integer("num_experts", 256))
        top_k = num_experts_per_token(config, num_experts, default=8)
        matrix_names = ("w1", "w3", "w2")

        def read(name: str, layer: int) -> Experts:
            return Experts(
                load_router(load, f"{name}.{_NAMES.router}", num_experts, hidden, is_float32=True),
                load_experts(
                    load, f"{name}.{_NAMES.experts}", num_experts, hidden, blueprint.inner, matrix_names
                ),
                top_k,
                ScoreRouting("sigmoid", is_normed=True),
                blueprint.activation,
                load_correction_bias(load, f"{name}.e_score_correction_bias", num_experts),
                is_router_float32=True,
            )

        return read


_NAMES = TensorNames(feed_forward="block_sparse_moe", is_router_float32=True)
_REQUIRED_VALUES = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
"""The only supported value of each of these keys in ``config.json``."""


def _check_options(config: HuggingFaceConfig) -> None:
    for key, value in _REQUIRED_VALUES.items():
        if config.get(key) not in (None, value):
            raise ConfigError(key, f"must be {value!r} in this family, was {config[key]!r}")
    attention_types = config.integers("attn_type_list") or ()
    if any(attention_type != 1 for attention_type in attention_types):
        raise ConfigError("attn_type_list", f"must be 1 for all layers, was {list(attention_types)}")
