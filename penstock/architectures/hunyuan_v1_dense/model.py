"""Hunyuan dense models (model card of tencent/Hunyuan-7B-Instruct): Llama with Q and K norms after RoPE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.kernels import StepInputs
from penstock.nn import (
    Attention,
    BlockParts,
    Blueprint,
    Loader,
    RotaryRows,
    TensorNames,
    attentions,
    llama_parts,
    rope_values,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


@dataclass(frozen=True, slots=True)
class HunyuanAttention(Attention):
    """Attention with norms of queries and keys after the rotary embedding."""

    def _normalize_and_rotate(
        self, q: Tensor, k: Tensor, rows: Sequence[RotaryRows], step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        q, k = self._rotate(q, k, rows, step)
        return self._apply_norm(q, self.q_norm, step), self._apply_norm(k, self.k_norm, step)


class HunyuanV1DenseModel(TransformerModel):
    """Reads the configuration of dense Hunyuan models and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        if config.flag("use_cla"):
            raise ConfigError("use_cla", "is true: layers that share keys and values are not supported")
        if not config.flag("use_qk_norm", True):
            raise ConfigError("use_qk_norm", "is false: this family has norms of queries and keys")
        attention_bias = config.flag("attention_bias")
        return Blueprint.from_huggingface(
            config,
            rope_parameters=_rope_parameters(config),
            names=TensorNames(query_norm="query_layernorm", key_norm="key_layernorm"),
            head_norms="each",
            norm_eps=config.number("rms_norm_eps", 1e-5),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
        )

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        return replace(llama_parts(load, blueprint), attention=attentions(load, blueprint, HunyuanAttention))


def _rope_parameters(config: HuggingFaceConfig) -> Mapping[str, object]:
    """Return the RoPE parameters.

    Rope type ``dynamic`` with ``alpha`` becomes type ``default`` with the base multiplied by
    ``alpha^(D / (D - 2))``.

    Raises:
        ConfigError: the type is ``dynamic``, and ``alpha`` is negative or not a number, the head size D is
            below 4, or the base is not a number.
    """
    parameters = rope_values(config)
    alpha, kind = parameters.get("alpha"), parameters.get("rope_type", parameters.get("type"))
    if kind != "dynamic" or not alpha:
        return parameters
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or alpha <= 0:
        raise ConfigError("rope_scaling.alpha", f"must be a positive number, was {alpha!r}")
    heads = config.integer("num_attention_heads")
    dim = config.integer("head_dim", max(1, config.integer("hidden_size") // heads))
    base = parameters.get("rope_theta", config.number("rope_theta", 10000.0))
    if dim < 4 or not isinstance(base, int | float):
        raise ConfigError(
            "rope_scaling.alpha",
            f"needs a head_dim of at least 4 and a numeric rope_theta, was {dim} and {base!r}",
        )
    return {"rope_type": "default", "rope_theta": base * alpha ** (dim / (dim - 2))}
