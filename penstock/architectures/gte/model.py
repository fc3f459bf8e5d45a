"""GTE (Zhang et al. 2024, arXiv:2407.19669): BERT with RoPE and gated feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.architectures.post_norm import PostNormModel
from penstock.kernels import StepInputs
from penstock.nn import (
    ClassifierNames,
    EncoderNames,
    Loader,
    MaskedLMNames,
    PostNormEncoder,
    PostNormSizes,
    RotaryConfig,
    load_classifier,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

_TOKEN_WEIGHTS = ClassifierNames(dense=None, activation=None, output="classifier")


def remove_family_prefix(name: str) -> str:
    """Return a tensor name without the prefix ``gte.`` or ``new.`` of models with a head."""
    return name.removeprefix("gte.").removeprefix("new.")


class GteModel(PostNormModel):
    """Reads the configuration of GTE and builds its network.

    A checkpoint can have a token-classification head with one label. Its logit is the weight of a token in
    sparse embeddings (section 3.2 of the paper).
    """

    weights_adapter = remove_family_prefix
    position_types = ("rope", "absolute")  # transformers writes BERT's default, "absolute"
    ignored_weights = ("pooler.*", "lm_head.*", "*rotary_emb.inv_freq")
    names = EncoderNames(
        positions=None,
        qkv=("attention.qkv_proj",),
        output="attention.o_proj",
        attention_norm="attn_ln",
        gate="mlp.up_gate_proj",
        up="mlp.up_gate_proj",
        down="mlp.down_proj",
        mlp_norm="mlp_ln",
    )
    classifier_names = ClassifierNames(dense="pooler.dense", output="classifier")
    masked_lm_names = MaskedLMNames(norm="lm_head.norm", bias="lm_head.decoder.bias")

    @classmethod
    def sizes(cls, config: HuggingFaceConfig) -> PostNormSizes:
        sizes = super().sizes(config)
        rotary = cls.rotary(config, sizes.hidden // sizes.heads)
        return replace(sizes, rotary=rotary, positions=rotary.max_length, up_bias=False)

    @classmethod
    def rotary(cls, config: HuggingFaceConfig, head_dim: int) -> RotaryConfig:
        """Return the configuration of the rotary embedding for heads of ``head_dim`` dims."""
        return RotaryConfig.from_huggingface(config, head_dim, default_rope_theta=160000.0)

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> PostNormEncoder:
        network = super().build(load, huggingface_config, max_length)
        if network.classifier is not None or f"{_TOKEN_WEIGHTS.output}.weight" not in load.source:
            return network
        weights = load_classifier(load, _TOKEN_WEIGHTS, 1, network.tokens.shape[1])
        return replace(network, token_weights=weights)

    @property
    def token_weights(self) -> Callable[[Tensor, StepInputs], Tensor] | None:
        network = self.network
        assert isinstance(network, PostNormEncoder)
        return network.token_weights
