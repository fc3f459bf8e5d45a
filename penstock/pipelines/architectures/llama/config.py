"""What the network needs to know of a Llama checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.kernels import Activation
from penstock.nn import RotaryConfig

if TYPE_CHECKING:
    from penstock.pipelines.config import HuggingFaceConfig

_MOST_LAYERS = 10_000
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
            ConfigError: heads that do not divide, an activation or a type of rope that is not known.
            CheckpointError: a size is missing, or no size.
        """
        hidden = config.count("hidden_size")
        heads = config.count("num_attention_heads")
        kv_heads = config.count("num_key_value_heads", default=heads)
        head_dim = config.count("head_dim", default=hidden // heads)
        if heads % kv_heads:
            raise ConfigError(
                "num_key_value_heads", f"{kv_heads} kv heads do not divide {heads} attention heads"
            )
        activation = config.get("hidden_act", "silu")
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            raise ConfigError("hidden_act", f"{activation!r} is not known: use {', '.join(_ACTIVATIONS)}")
        return cls(
            vocabulary=config.count("vocab_size"),
            hidden=hidden,
            inner=config.count("intermediate_size"),
            layers=config.count("num_hidden_layers", most=_MOST_LAYERS),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=config.positive("rms_norm_eps", 1e-6),
            activation=_ACTIVATIONS[activation],
            rotary=RotaryConfig.from_huggingface(config, head_dim),
            tied_head=config.flag("tie_word_embeddings"),
            attention_bias=config.flag("attention_bias"),
            mlp_bias=config.flag("mlp_bias"),
        )
