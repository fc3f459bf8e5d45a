"""`EmbedderModel`: the base class of embedders, rerankers and classifiers with a decoder network.

The model computes whole inputs in one step, without a KV cache. A subclass sets `decoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from penstock.architectures.encoder import EncoderModel, has_head
from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.kernels import StepInputs
from penstock.nn import (
    Blueprint,
    ClassificationHead,
    ClassifierNames,
    DecoderTrunk,
    Loader,
    TensorNames,
    load_classifier,
    num_labels,
)
from penstock.pipelines.core import PoolingType

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


@dataclass(frozen=True, slots=True)
class EmbedderNetwork:
    """A decoder without its LM head: ``tokens [T]`` -> hidden states ``[T, E]`` after the final norm.

    It can have a head for classification or for masked language modelling.
    """

    trunk: DecoderTrunk
    classifier: ClassificationHead | None = None
    masked_lm_head: Callable[[Tensor, StepInputs], Tensor] | None = None

    @property
    def is_length_dependent(self) -> bool:
        """Whether the angles of the rotary embeddings depend on the length of the sequence."""
        return self.trunk.is_length_dependent

    def __call__(self, tokens: Tensor, step: StepInputs, token_types: Tensor | None = None) -> Tensor:
        """``tokens [T]`` -> hidden states ``[T, E]``; decoders have no token types."""
        return self.trunk(tokens, step)[1]


def remove_model_prefix(name: str) -> str:
    """Return the name of a tensor without the prefix ``model.``.

    Only checkpoints of models with a head have this prefix.
    """
    return name.removeprefix("model.")


class EmbedderModel(EncoderModel):
    """An `EncoderModel` whose network is the decoder that a `Blueprint` describes."""

    decoder: ClassVar[type[TransformerModel]]
    """The family's model for text generation."""
    classifier_names: ClassVar[ClassifierNames] = ClassifierNames(dense=None, activation=None, output="score")
    weights_adapter = remove_model_prefix
    ignored_weights = ("*rotary_emb.inv_freq", "lm_head.*")
    default_pooling: PoolingType = "last_token"

    @property
    def classifier_pooling(self) -> PoolingType:
        return "last_token"

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        """Return the blueprint of the decoder, with tensor names without the prefix ``model.``.

        Raises:
            ConfigError: the family has attention sinks or soft caps on attention scores, or the decoder does
                not support the configuration.
        """
        blueprint = cls.decoder.blueprint(huggingface_config)
        if blueprint.attention_soft_cap is not None or blueprint.has_sinks:
            raise ConfigError(
                "model_type", "attention soft caps and sinks are not supported without a KV cache"
            )
        return replace(blueprint, names=replace(blueprint.names, prefix=""))

    @classmethod
    def is_causal(cls, huggingface_config: HuggingFaceConfig) -> bool:
        """Return whether attention is causal."""
        return True

    @classmethod
    def tensor_names(cls, huggingface_config: HuggingFaceConfig) -> TensorNames:
        return cls.blueprint(huggingface_config).names

    @classmethod
    def max_positions(cls, huggingface_config: HuggingFaceConfig) -> int:
        return cls.blueprint(huggingface_config).max_length

    @classmethod
    def classifier(
        cls, load: Loader, huggingface_config: HuggingFaceConfig, trunk: DecoderTrunk
    ) -> ClassificationHead | None:
        """Return the classification head; None if ``architectures`` does not name a sequence classifier."""
        if not has_head(huggingface_config, "ForSequenceClassification"):
            return None
        labels, hidden = num_labels(huggingface_config), trunk.embedding.table.shape[1]
        has_bias = f"{cls.classifier_names.output}.bias" in load.source
        return load_classifier(load, cls.classifier_names, labels, hidden, bias=has_bias)

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> EmbedderNetwork:
        blueprint = cls.blueprint(huggingface_config)
        parts = cls.decoder.parts(load, blueprint, huggingface_config)
        block = cls.decoder.block(load, blueprint, huggingface_config, parts)
        trunk = DecoderTrunk.load(load, blueprint, max_length, parts, block)
        if not cls.is_causal(huggingface_config):
            trunk = trunk.bidirectional()
        masked_lm_head = None
        if has_head(huggingface_config, "ForMaskedLM"):
            tied_to = trunk.embedding.table if blueprint.tied_head else None
            masked_lm_head = load.head(
                blueprint.names.head, blueprint.vocab_size, blueprint.hidden, tied_to=tied_to
            )
        return EmbedderNetwork(trunk, cls.classifier(load, huggingface_config, trunk), masked_lm_head)
