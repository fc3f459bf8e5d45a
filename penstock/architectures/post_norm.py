"""`PostNormModel`: an encoder whose network is a `PostNormEncoder`, with the heads of its checkpoint.

A family subclasses `PostNormModel` and defines the names of its tensors. The family overrides `sizes` if the
keys of its ``config.json`` differ from the keys of BERT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from penstock.architectures.encoder import EncoderModel, has_head
from penstock.errors import ConfigError
from penstock.nn import (
    MAX_LAYERS,
    ClassifierNames,
    EncoderNames,
    Loader,
    MaskedLMHead,
    MaskedLMNames,
    PostNormEncoder,
    PostNormSizes,
    TensorNames,
    activation_named,
    load_classifier,
    load_masked_lm_head,
    num_labels,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


def prefix_remover(prefix: str) -> Callable[[str], str]:
    """Return a weights adapter that removes a prefix, which only checkpoints with a head have."""
    return lambda name: name.removeprefix(prefix)


class PostNormModel(EncoderModel):
    """An encoder with post-norm blocks."""

    names: ClassVar[EncoderNames]
    position_types: ClassVar[tuple[str, ...]] = ("absolute",)
    """The values of ``position_embedding_type`` that the family supports."""
    classifier_names: ClassVar[ClassifierNames] = ClassifierNames()
    masked_lm_names: ClassVar[MaskedLMNames] = MaskedLMNames()

    @classmethod
    def tensor_names(cls, huggingface_config: HuggingFaceConfig) -> TensorNames:
        names = cls.encoder_names(huggingface_config)
        tables = (names.positions, names.token_types)
        return TensorNames(
            prefix="",
            embedding=names.tokens,
            head=cls.masked_lm_names.decoder,
            block=names.block,
            other_tables=tuple(f"{name}.weight" for name in tables if name is not None),
        )

    @classmethod
    def encoder_names(cls, config: HuggingFaceConfig) -> EncoderNames:
        """Return the tensor names of a checkpoint; by default the names of the family."""
        return cls.names

    @classmethod
    def sizes(cls, config: HuggingFaceConfig) -> PostNormSizes:
        """Read a ``config.json`` with the keys of BERT.

        Raises:
            ConfigError: the heads do not divide the hidden size, or the position type or the activation is
                not supported.
            CheckpointError: a size is missing or has an invalid value.
        """
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        if hidden % heads:
            raise ConfigError("num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}")
        position_type = config.text("position_embedding_type", cls.position_types[0])
        if position_type not in cls.position_types:
            supported = " and ".join(map(repr, cls.position_types))
            raise ConfigError(
                "position_embedding_type", f"{position_type!r} is not supported, only {supported}"
            )
        return PostNormSizes(
            vocab_size=config.integer("vocab_size"),
            positions=config.integer("max_position_embeddings", 512),
            token_types=config.integer("type_vocab_size", 2, minimum=0),
            layers=config.integer("num_hidden_layers", maximum=MAX_LAYERS),
            hidden=hidden,
            inner=config.integer("intermediate_size"),
            heads=heads,
            norm_eps=config.number("layer_norm_eps", 1e-12),
            activation=activation_named(config.get("hidden_act") or "gelu", "hidden_act"),
        )

    @property
    def reads_token_types(self) -> bool:
        network = self.network
        assert isinstance(network, PostNormEncoder)
        return network.token_types is not None and len(network.token_types) > 1

    @classmethod
    def max_positions(cls, huggingface_config: HuggingFaceConfig) -> int:
        return cls.sizes(huggingface_config).max_length

    @classmethod
    def attention_bias(
        cls, load: Loader, huggingface_config: HuggingFaceConfig, sizes: PostNormSizes
    ) -> Callable[[int], Tensor] | None:
        """Return a function that maps a length P to the attention bias ``[H, 2P - 1]``; None without bias."""
        return None

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> PostNormEncoder:
        sizes = cls.sizes(huggingface_config)
        classifier = masked_lm_head = None
        if has_head(huggingface_config, "ForSequenceClassification"):
            labels = num_labels(huggingface_config)
            classifier = load_classifier(load, cls.classifier_names, labels, sizes.hidden)
        elif has_head(huggingface_config, "ForMaskedLM"):

            def masked_lm_head(tokens: Tensor) -> MaskedLMHead:
                return load_masked_lm_head(
                    load, cls.masked_lm_names, tokens, sizes.activation, sizes.norm_eps
                )

        return PostNormEncoder.load(
            load,
            sizes,
            cls.encoder_names(huggingface_config),
            max_length=max_length,
            classifier=classifier,
            masked_lm_head=masked_lm_head,
            attention_bias=cls.attention_bias(load, huggingface_config, sizes),
        )
