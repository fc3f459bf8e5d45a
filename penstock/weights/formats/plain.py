"""Plain floats, as transformers writes them: ``<layer>.weight`` of a float type."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.weights.formats import CheckpointFormat, Headers, quant_method


class PlainFormat(CheckpointFormat):
    """Safetensors files whose ``config.json`` names no quantization."""

    name = "plain"
    priority = -1  # formats that are detected by their tensors come first

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        return quant_method(config) is None


FORMAT = PlainFormat()
