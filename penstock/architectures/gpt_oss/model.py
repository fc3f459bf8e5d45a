"""gpt-oss (OpenAI 2025, arXiv:2508.10925): clamped SwiGLU, attention sinks, windows in half of the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.gpt_oss.weights import load_experts
from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.kernels import ClampedSwiGLU
from penstock.nn import (
    FULL,
    SLIDING,
    Blueprint,
    Experts,
    Loader,
    LoadFeedForward,
    TensorNames,
    layer_types,
    layer_windows,
    load_router,
    num_experts_per_token,
    num_layers,
    rope_values,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class GptOssModel(TransformerModel):
    """Reads the configuration of gpt-oss and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ConfigError("hidden_act", f"must be silu in this family, was {config.hidden_act!r}")
        bias = config.flag("attention_bias", True)
        alternating = tuple((SLIDING, FULL)[layer % 2] for layer in range(num_layers(config)))
        return Blueprint.from_huggingface(
            config,
            default_head_dim=64,
            default_rope_theta=150_000.0,
            rope_parameters=rope_values(config) or _DEFAULT_YARN,
            norm_eps=config.number("rms_norm_eps", 1e-5),
            qkv_bias=bias,
            output_bias=bias,
            has_sinks=True,
            names=_NAMES,
            windows=layer_windows(config, layer_types(config, alternating), _DEFAULT_WINDOW),
        )

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        num_experts = huggingface_config.integer("num_local_experts", 128)
        top_k = num_experts_per_token(huggingface_config, num_experts, default=4)
        gating = ClampedSwiGLU(_ALPHA, huggingface_config.number("swiglu_limit", 7.0))

        def read(name: str, layer: int) -> Experts:
            return Experts(
                load_router(load, f"{name}.{_NAMES.router}", num_experts, blueprint.hidden, bias=True),
                load_experts(
                    load, f"{name}.{_NAMES.experts}", num_experts, blueprint.hidden, blueprint.inner
                ),
                top_k,
                "chosen",
                gating,
            )

        return read


_NAMES = TensorNames(router="router", other_tables=("_proj_bias",))  # biases of all experts: one matrix
_ALPHA = 1.702  # g * sigmoid(alpha g) approximates GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)
_DEFAULT_WINDOW = 128
_DEFAULT_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
