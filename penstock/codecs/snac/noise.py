"""Gaussian noise that depends on the position in the stream, but not on its division into chunks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def noise_at(layer: int, start: int, stop: int) -> Tensor:
    """Return standard normal numbers ``[stop - start]`` float32 for the rows ``start`` to ``stop - 1``.

    ``layer`` is the index of the layer. The random bits are those of splitmix64.
    """
    positions = np.arange(start, stop, dtype=np.uint64) + np.uint64(layer << 48)
    with np.errstate(over="ignore"):
        z = (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    # Box-Muller transform. The first uniform number must be above 0, because its logarithm is computed.
    radius = np.sqrt(-2 * np.log(((z >> np.uint64(32)).astype(np.float64) + 1) / 2**32))
    angle = (z & np.uint64(0xFFFFFFFF)).astype(np.float64) * (2 * np.pi / 2**32)
    return torch.from_numpy((radius * np.cos(angle)).astype(np.float32))
