"""What the network needs to know of a Llama checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.kernels import Activation
from penstock.nn import RotaryConfig

if TYPE_CHECKING:
    from penstock.pipelines.config import HuggingFaceConfig

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The blueprint of a Llama network."""

    vocabulary: int  # V
    hidden: int  # E
    inner: int
    layers: int  # L
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    norm_eps: float
    activation: Activation
    rotary: RotaryConfig
    tied_head: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_huggingface(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """Reads a ``config.json``.

        Raises:
            ConfigError: heads that do not divide, or an activation that is not known.
        """
        heads = config.num_attention_heads
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config.hidden_size // heads
        if heads % kv_heads:
            raise ConfigError(
                "num_key_value_heads", f"{kv_heads} kv heads do not divide {heads} attention heads"
            )
        activation = config.get("hidden_act", "silu")
        if activation not in _ACTIVATIONS:
            raise ConfigError("hidden_act", f"{activation!r} is not known: use {', '.join(_ACTIVATIONS)}")
        return cls(
            vocabulary=config.vocab_size,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            activation=_ACTIVATIONS[activation],
            rotary=RotaryConfig.from_huggingface(config, head_dim),
            tied_head=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
        )
