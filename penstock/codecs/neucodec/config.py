"""The sizes of a NeuCodec checkpoint, read from its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from penstock.config import HuggingFaceConfig
from penstock.errors import CheckpointError, UnsupportedFeatureError


@dataclass(frozen=True, slots=True)
class SemanticConfig:
    """The sizes of the semantic encoder, a W2v-BERT model."""

    num_features: int
    """Number of features in an input row: the mel bins of two successive frames."""
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kernel_size: int
    max_left_distance: int
    """Largest distance of a key before its query that has its own embedding. Larger distances use the same
    embedding.
    """
    max_right_distance: int
    """Largest distance of a key after its query that has its own embedding. Larger distances use the same
    embedding.
    """
    norm_eps: float

    @classmethod
    def read(cls, values: HuggingFaceConfig) -> SemanticConfig:
        """Read the ``semantic_model_config`` of a ``config.json``.

        Missing values have the defaults of W2v-BERT, except ``num_hidden_layers``: NeuCodec has 16 layers.

        Raises:
            CheckpointError: a value has the wrong type.
            UnsupportedFeatureError: the encoder has another type, activation or position embeddings, or an
                adapter.
        """
        positions = values.text("position_embeddings_type", "relative_key")
        for name, value, supported_value in (
            ("model_type", values.text("model_type", "wav2vec2-bert"), "wav2vec2-bert"),
            ("hidden_act", values.text("hidden_act", "swish"), "swish"),
            ("position_embeddings_type", positions, "relative_key"),
            ("add_adapter", values.flag("add_adapter"), False),
        ):
            if value != supported_value:
                raise UnsupportedFeatureError(
                    f"NeuCodec's semantic encoder with {name} {value}",
                    f"only {supported_value} is implemented",
                )
        return cls(
            num_features=values.integer("feature_projection_input_dim", 160),
            hidden_size=values.integer("hidden_size", 1024),
            intermediate_size=values.integer("intermediate_size", 4096),
            layers=values.integer("num_hidden_layers", 16),
            heads=values.integer("num_attention_heads", 16),
            kernel_size=values.integer("conv_depthwise_kernel_size", 31),
            max_left_distance=values.integer("left_max_position_embeddings", 64),
            max_right_distance=values.integer("right_max_position_embeddings", 8),
            norm_eps=values.number("layer_norm_eps", 1e-5),
        )


@dataclass(frozen=True, slots=True)
class NeuCodecConfig:
    """The sizes of a NeuCodec checkpoint. `semantic` reads the sizes of the semantic encoder on demand."""

    sample_rate: int
    encoder_sample_rate: int
    hop: int
    """Number of decoded samples per frame."""
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    head_dim: int
    quantization_dim: int
    levels: tuple[int, ...]
    """Finite scalar quantization (FSQ): a code is a mixed-radix number.

    These are the numbers of levels of its digits, the lowest digit first.
    """
    rms_norm_eps: float
    encoder_hidden_size: int
    """Number of channels of the first convolution of the acoustic encoder."""
    encoder_strides: tuple[int, ...]
    """The strides of the blocks of the acoustic encoder."""
    semantic_values: HuggingFaceConfig
    """The section ``semantic_model_config``."""

    @property
    def encoder_hop(self) -> int:
        """Number of input samples of the encoder per frame."""
        return prod(self.encoder_strides)

    def semantic(self) -> SemanticConfig:
        """Return the sizes of the semantic encoder; see `SemanticConfig.read`."""
        return SemanticConfig.read(self.semantic_values)

    @classmethod
    def read(cls, config: Mapping[str, object], folder: Path) -> NeuCodecConfig:
        """Read a ``config.json``.

        Raises:
            CheckpointError: a value is missing or has the wrong type, or a frame has no whole number of
                samples.
            UnsupportedFeatureError: the checkpoint has another activation, attention biases, or grouped-query
                attention.
        """
        values = HuggingFaceConfig(config, str(folder / "config.json"))
        heads = values.integer("num_attention_heads")
        for name, value, supported_value in (
            ("hidden_act", values.text("hidden_act", "silu"), "silu"),
            ("attention_bias", values.flag("attention_bias"), False),
            ("num_key_value_heads", values.integer("num_key_value_heads", heads), heads),
        ):
            if value != supported_value:
                raise UnsupportedFeatureError(
                    f"NeuCodec with {name} {value}",
                    f"only {supported_value} is implemented: use another checkpoint",
                )
        rates = values.integer("output_sampling_rate"), values.integer("input_sampling_rate")
        encoder_strides = values.integers("downsampling_ratios") or (0,)
        samples = rates[0] * prod(encoder_strides)
        if not samples or samples % rates[1]:
            raise CheckpointError(
                folder, "downsampling_ratios must result in a whole number of samples per frame"
            )
        hidden_size = values.integer("hidden_size")
        return cls(
            sample_rate=rates[0],
            encoder_sample_rate=rates[1],
            hop=samples // rates[1],
            hidden_size=hidden_size,
            intermediate_size=values.integer("intermediate_size"),
            layers=values.integer("num_hidden_layers"),
            heads=heads,
            head_dim=values.integer("head_dim", hidden_size // heads),
            quantization_dim=values.integer("quantization_dim"),
            levels=values.integers("quantization_levels") or (4,) * 8,
            rms_norm_eps=values.number("rms_norm_eps", 1e-6),
            encoder_hidden_size=values.integer("encoder_hidden_size", 48),
            encoder_strides=encoder_strides,
            semantic_values=values.section("semantic_model_config"),
        )
