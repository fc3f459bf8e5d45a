"""The configuration and the tensor names of GPT-2 checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.kernels import Activation
from penstock.nn import MAX_LAYERS, TensorNames, activation_named

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

NAMES = TensorNames(
    prefix="transformer.",
    embedding="wte",
    norm="ln_f",
    block="h.{layer}",
    attention="attn",
    qkv=("c_attn",),
    output="c_proj",
    other_tables=("wpe.weight",),
)
"""The tensor names of a GPT-2 checkpoint. Weights of linear layers are stored ``[in, out]``."""


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The sizes and options of a GPT-2 network."""

    vocab_size: int  # V
    positions: int  # P
    hidden: int  # E
    inner: int  # F
    heads: int  # H
    attention_scales: tuple[float, ...]  # [L]
    norm_eps: float
    activation: Activation
    tied_head: bool

    @property
    def layers(self) -> int:
        """The number of layers, L."""
        return len(self.attention_scales)

    @property
    def head_dim(self) -> int:
        """The size of a head, D."""
        return self.hidden // self.heads

    @classmethod
    def from_huggingface(cls, config: HuggingFaceConfig) -> GPT2Config:
        """Read a ``config.json``.

        ``reorder_and_upcast_attn`` has no effect, because attention scores are always float32.

        Raises:
            ConfigError: the heads do not divide the hidden size, the activation is unknown, or the model has
                cross attention.
            CheckpointError: a size is missing or has an invalid value.
        """
        hidden, heads = config.integer("n_embd"), config.integer("n_head")
        if hidden % heads:
            raise ConfigError("n_head", f"{heads} heads do not divide n_embd {hidden}")
        if config.flag("add_cross_attention"):
            raise ConfigError("add_cross_attention", "is true: cross attention is not supported")
        scale = (hidden // heads) ** -0.5 if config.flag("scale_attn_weights", True) else 1.0
        divides_by_layer = config.flag("scale_attn_by_inverse_layer_idx")
        return cls(
            vocab_size=config.integer("vocab_size"),
            positions=config.integer("n_positions"),
            hidden=hidden,
            inner=config.integer("n_inner", 4 * hidden),
            heads=heads,
            attention_scales=tuple(
                scale / (layer + 1) if divides_by_layer else scale
                for layer in range(config.integer("n_layer", maximum=MAX_LAYERS))
            ),
            norm_eps=config.number("layer_norm_epsilon", 1e-5),
            activation=activation_named(config.get("activation_function", "gelu_new"), "activation_function"),
            tied_head=config.flag("tie_word_embeddings", True),
        )
