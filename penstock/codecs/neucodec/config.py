"""The sizes of a NeuCodec checkpoint, as its ``config.json`` gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from penstock.config import HuggingFaceConfig
from penstock.errors import CheckpointError, UnsupportedFeatureError


@dataclass(frozen=True, slots=True)
class NeuCodecConfig:
    """The sizes of the decoder of a NeuCodec checkpoint."""

    sample_rate: int
    encoder_sample_rate: int
    hop: int
    """Decoded samples of a frame."""
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    head_dim: int
    quantization_dim: int
    levels: tuple[int, ...]
    """Levels of each digit of a code, the lowest digit first."""
    rms_norm_eps: float

    @classmethod
    def read(cls, config: Mapping[str, object], folder: Path) -> NeuCodecConfig:
        """Read a ``config.json``.

        Raises:
            CheckpointError: a value is missing or of another type.
            UnsupportedFeatureError: the checkpoint has another activation, biases, or grouped queries.
        """
        values = HuggingFaceConfig(config, str(folder / "config.json"))
        heads = values.integer("num_attention_heads")
        for name, found, known in (
            ("hidden_act", values.text("hidden_act", "silu"), "silu"),
            ("attention_bias", values.flag("attention_bias"), False),
            ("num_key_value_heads", values.integer("num_key_value_heads", heads), heads),
        ):
            if found != known:
                raise UnsupportedFeatureError(
                    f"NeuCodec with {name} {found}", f"only {known} is implemented: use another checkpoint"
                )
        rates = values.integer("output_sampling_rate"), values.integer("input_sampling_rate")
        samples = rates[0] * prod(values.integers("downsampling_ratios") or (0,))
        if not samples or samples % rates[1]:
            raise CheckpointError(folder, "downsampling_ratios must give whole numbers of samples per frame")
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
        )
