"""What the network needs to know of a GPT-2 checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.kernels import Activation
from penstock.nn import activation_named

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

_MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The blueprint of a GPT-2 network."""

    vocabulary: int  # V
    positions: int  # P
    hidden: int  # E
    inner: int  # F
    heads: int  # H
    scales: tuple[float, ...]  # [L]: of each layer's scores
    norm_eps: float
    activation: Activation
    tied_head: bool

    @property
    def layers(self) -> int:
        """L."""
        return len(self.scales)

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden // self.heads

    @classmethod
    def from_huggingface(cls, config: HuggingFaceConfig) -> GPT2Config:
        """Reads a ``config.json``; ``reorder_and_upcast_attn`` changes nothing, scores are float32 anyway.

        Raises:
            ConfigError: heads that do not divide, an unknown activation, or attention to an encoder.
            CheckpointError: a size is missing, or no size.
        """
        hidden, heads = config.count("n_embd"), config.count("n_head")
        if hidden % heads:
            raise ConfigError("n_head", f"{heads} heads do not divide n_embd {hidden}")
        if config.flag("add_cross_attention"):
            raise ConfigError("add_cross_attention", "is true: there is no encoder to attend to")
        scale = (hidden // heads) ** -0.5 if config.flag("scale_attn_weights", True) else 1.0
        by_layer = config.flag("scale_attn_by_inverse_layer_idx")
        return cls(
            vocabulary=config.count("vocab_size"),
            positions=config.count("n_positions"),
            hidden=hidden,
            inner=config.count("n_inner", 4 * hidden),
            heads=heads,
            scales=tuple(
                scale / (layer + 1) if by_layer else scale
                for layer in range(config.count("n_layer", most=_MAX_LAYERS))
            ),
            norm_eps=config.positive("layer_norm_epsilon", 1e-5),
            activation=activation_named(config.get("activation_function", "gelu_new"), "activation_function"),
            tied_head=config.flag("tie_word_embeddings", True),
        )
