"""SNAC: residual vector quantization at several rates with convolutional encoder and decoder
(arXiv:2410.14411).
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.codecs.registry import SupportedCodec


def _detect(config: Mapping[str, object]) -> bool:
    """Return whether a configuration belongs to SNAC. Published checkpoints have no ``model_type``."""
    return config.get("model_type", "snac") == "snac" and "vq_strides" in config


CODEC = SupportedCodec(
    name="snac",
    detect=_detect,
    codec="model:SnacCodec",
    encodings=("float32", "int8"),
    example_repo_ids=("hubertsiuzdak/snac_24khz",),
)
