"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT without token types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.post_norm import PostNormModel, prefix_remover
from penstock.errors import ConfigError
from penstock.nn import (
    MAX_LAYERS,
    ClassifierNames,
    EncoderNames,
    MaskedLMNames,
    PostNormSizes,
    activation_named,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class DistilBertModel(PostNormModel):
    """Reads the configuration of DistilBERT and builds its network."""

    weights_adapter = prefix_remover("distilbert.")
    ignored_weights = ("vocab_*",)
    names = EncoderNames(
        token_types=None,
        block="transformer.layer.{layer}",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        output="attention.out_lin",
        attention_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        mlp_norm="output_layer_norm",
    )
    classifier_names = ClassifierNames(dense="pre_classifier", activation="relu", output="classifier")
    masked_lm_names = MaskedLMNames(
        dense="vocab_transform",
        norm="vocab_layer_norm",
        decoder="vocab_projector",
        bias="vocab_projector.bias",
    )

    @classmethod
    def sizes(cls, config: HuggingFaceConfig) -> PostNormSizes:
        hidden, heads = config.integer("dim", 768), config.integer("n_heads", 12)
        if hidden % heads:
            raise ConfigError("n_heads", f"{heads} heads do not divide dim {hidden}")
        return PostNormSizes(
            vocab_size=config.integer("vocab_size"),
            positions=config.integer("max_position_embeddings", 512),
            token_types=0,
            layers=config.integer("n_layers", 6, maximum=MAX_LAYERS),
            hidden=hidden,
            inner=config.integer("hidden_dim", 3072),
            heads=heads,
            norm_eps=1e-12,
            activation=activation_named(config.get("activation") or "gelu", "activation"),
        )
