"""`CodecWeights`: the tensors of a codec checkpoint, from safetensors files or from ``pytorch_model.bin``."""

from __future__ import annotations

from penstock.weights.pickled import FolderWeights as CodecWeights
from penstock.weights.pickled import open_weights

__all__ = ["CodecWeights", "open_weights"]
