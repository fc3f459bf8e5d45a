"""plain: unquantized checkpoints, with ``<layer>.weight`` in a float type."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.weights.formats import CheckpointFormat, Headers, quant_method


class PlainFormat(CheckpointFormat):
    """Safetensors files without a ``quant_method`` in the configuration."""

    name = "plain"
    priority = -1  # formats that are detected by their tensors have precedence

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        return quant_method(config) is None


FORMAT = PlainFormat()
