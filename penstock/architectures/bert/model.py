"""BERT (Devlin et al. 2019, arXiv:1810.04805): learned positions and token types, post-norm blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from penstock.architectures.encoder import EncoderModel
from penstock.errors import ConfigError
from penstock.nn import (
    MAX_LAYERS,
    ClassificationHead,
    EncoderNames,
    Loader,
    PostNormEncoder,
    PostNormSizes,
    TensorNames,
    VocabularyHead,
    activation_named,
    num_labels,
)
from penstock.nn.encoder_heads import gelu, plain_linear, relu, tanh

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

_HEAD_ACTIVATIONS = {"gelu": gelu, "relu": relu}


def without_prefix(name: str) -> str:
    """Return the name of a tensor without ``bert.``, which models with a head have and others lack.

    The first converted checkpoints call the parameters of layer norms gamma and beta.
    """
    name = name.removeprefix("bert.")
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


class BertModel(EncoderModel):
    """BERT as a pipeline model."""

    weights_adapter = without_prefix

    ignored_weights = (
        "embeddings.position_ids",
        "pooler.*",
        "cls.seq_relationship.*",
        "cls.predictions.*",
    )

    @classmethod
    def tensor_names(cls, huggingface_config: HuggingFaceConfig) -> TensorNames:
        return TensorNames(
            prefix="",
            embedding="embeddings.word_embeddings",
            head="cls.predictions.decoder",
            block="encoder.layer.{layer}",
            other_tables=("embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"),
        )

    @classmethod
    def sizes(cls, config: HuggingFaceConfig) -> PostNormSizes:
        """Read a ``config.json``.

        Raises:
            ConfigError: the heads do not divide the size, or positions or the activation are not supported.
            CheckpointError: a size is missing or has an impossible value.
        """
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        if hidden % heads:
            raise ConfigError("num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}")
        kind = config.text("position_embedding_type", "absolute")
        if kind != "absolute":
            raise ConfigError("position_embedding_type", f"{kind!r} is not supported, only 'absolute'")
        return PostNormSizes(
            vocabulary=config.integer("vocab_size"),
            positions=config.integer("max_position_embeddings", 512),
            token_types=config.integer("type_vocab_size", 2, minimum=0),
            layers=config.integer("num_hidden_layers", maximum=MAX_LAYERS),
            hidden=hidden,
            inner=config.integer("intermediate_size"),
            heads=heads,
            norm_eps=config.number("layer_norm_eps", 1e-12),
            activation=activation_named(config.get("hidden_act") or "gelu", "hidden_act"),
        )

    @classmethod
    def max_positions(cls, huggingface_config: HuggingFaceConfig) -> int:
        return cls.sizes(huggingface_config).max_length

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> PostNormEncoder:
        sizes, (kind, *_) = cls.sizes(huggingface_config), _architectures(huggingface_config)
        classifier = vocabulary = None
        if kind.endswith("ForSequenceClassification"):
            classifier = ClassificationHead(
                plain_linear(load, "classifier", num_labels(huggingface_config), sizes.hidden),
                plain_linear(load, "pooler.dense", sizes.hidden, sizes.hidden),
                tanh,
            )
        elif kind.endswith("ForMaskedLM"):

            def vocabulary(tokens: Tensor) -> VocabularyHead:
                return _vocabulary_head(load, huggingface_config, sizes, tokens)

        return PostNormEncoder.load(load, sizes, EncoderNames(), classifier=classifier, vocabulary=vocabulary)


def _vocabulary_head(
    load: Loader, config: HuggingFaceConfig, sizes: PostNormSizes, tokens: Tensor
) -> VocabularyHead:
    name, hidden = "cls.predictions", sizes.hidden
    activation = config.text("hidden_act", "gelu")
    if activation not in _HEAD_ACTIVATIONS:
        raise ConfigError("hidden_act", f"{activation!r} is not supported in the head: use gelu or relu")
    tied = f"{name}.decoder.weight" not in load.source
    weight = tokens if tied else load.source.tensor(f"{name}.decoder.weight", (sizes.vocabulary, hidden))
    bias = load.source.tensor(f"{name}.bias", (sizes.vocabulary,))
    return VocabularyHead(
        plain_linear(load, f"{name}.transform.dense", hidden, hidden),
        _HEAD_ACTIVATIONS[activation],
        load.layer_norm(f"{name}.transform.LayerNorm", hidden, sizes.norm_eps),
        load.pack(weight, {f"{name}.decoder": sizes.vocabulary}, bias=bias),
    )


def _architectures(config: HuggingFaceConfig) -> list[str]:
    names = config.get("architectures") or [""]
    return [str(name) for name in names] if isinstance(names, list) else [""]
