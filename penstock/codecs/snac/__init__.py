"""SNAC: residual codes at several rates, convolutional decoder and encoder (arXiv:2410.14411)."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.codecs.registry import SupportedCodec


def _detect(config: Mapping[str, object]) -> bool:
    """Published checkpoints have no ``model_type``; only SNAC has strides of its codebooks."""
    return config.get("model_type", "snac") == "snac" and "vq_strides" in config


CODEC = SupportedCodec(
    name="snac",
    detect=_detect,
    codec="model:SnacCodec",
    encodings=("float32", "int8"),
    example_repo_ids=("hubertsiuzdak/snac_24khz",),
)
