"""The sizes of a SNAC checkpoint, read from its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

from penstock.config import HuggingFaceConfig
from penstock.errors import CheckpointError, UnsupportedFeatureError


@dataclass(frozen=True, slots=True)
class SnacConfig:
    """The sizes of a SNAC checkpoint."""

    sample_rate: int
    encoder_dim: int
    encoder_rates: tuple[int, ...]
    decoder_dim: int
    decoder_rates: tuple[int, ...]
    latent_dim: int
    codebook_size: int
    codebook_dim: int
    strides: tuple[int, ...]
    """Number of latent rows that a code of each codebook represents, in descending order."""
    has_noise: bool
    is_depthwise: bool

    @property
    def hop(self) -> int:
        """Number of samples per latent row."""
        return prod(self.decoder_rates)

    @classmethod
    def read(cls, config: Mapping[str, object], folder: Path) -> SnacConfig:
        """Read a ``config.json``.

        Raises:
            CheckpointError: a value is missing or invalid.
            UnsupportedFeatureError: the checkpoint has attention layers.
        """
        values = HuggingFaceConfig(config, str(folder / "config.json"))
        if values.get("attn_window_size") is not None:
            raise UnsupportedFeatureError(
                "SNAC with attn_window_size", "its attention layers are not implemented: use SNAC 24 kHz"
            )
        lists = {name: values.integers(name) for name in ("encoder_rates", "decoder_rates", "vq_strides")}
        for name, numbers in lists.items():
            if not numbers or min(numbers) < 1:
                raise CheckpointError(folder, f"{name} must be a list of whole numbers above 0")
        encoder_rates, decoder_rates, strides = (numbers or () for numbers in lists.values())
        if prod(encoder_rates) != prod(decoder_rates):
            raise CheckpointError(folder, "encoder_rates and decoder_rates must have the same product")
        if any(stride % next_stride for stride, next_stride in pairwise(strides)):
            raise CheckpointError(
                folder, f"each of vq_strides must be a multiple of the next, were {list(strides)}"
            )
        encoder_dim = values.integer("encoder_dim")
        return cls(
            sample_rate=values.integer("sampling_rate"),
            encoder_dim=encoder_dim,
            encoder_rates=encoder_rates,
            decoder_dim=values.integer("decoder_dim"),
            decoder_rates=decoder_rates,
            latent_dim=values.integer("latent_dim", encoder_dim * 2 ** len(encoder_rates)),
            codebook_size=values.integer("codebook_size"),
            codebook_dim=values.integer("codebook_dim"),
            strides=strides,
            has_noise=values.flag("noise", True),
            is_depthwise=values.flag("depthwise", True),
        )
