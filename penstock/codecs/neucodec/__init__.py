"""NeuCodec: one codebook of 65,536 codes, 50 codes per second of audio (arXiv:2509.09550)."""

from __future__ import annotations

from penstock.codecs.registry import SupportedCodec

CODEC = SupportedCodec(
    name="neucodec",
    detect=lambda config: config.get("model_type") == "neucodec",
    codec="model:NeuCodec",
    encodings=("float32", "bfloat16", "int8"),
    example_repo_ids=("neuphonic/neucodec",),
)
