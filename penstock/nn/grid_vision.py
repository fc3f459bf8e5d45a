"""Layout and positions of vision encoders for images of any size: grids of patches, merged in squares.

The rows of an image are patches. Patches that merge into one output row are neighbours: merged rows go from
left to right and from top to bottom, and so do the patches of each (Wang et al. 2024, arXiv:2409.12191).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.nn.config_values import ConfigValues
from penstock.nn.rotary import RotaryRows

Grid = tuple[int, int]
"""Patches of an image, vertically and horizontally."""


def merge_order(values: Tensor, merge: int) -> Tensor:
    """Return ``values [h, w, ...]`` of a grid as rows ``[h w, ...]`` in the order of the patches."""
    height, width, *rest = values.shape
    blocks = values.reshape(height // merge, merge, width // merge, merge, *rest)
    return blocks.transpose(1, 2).reshape(height * width, *rest)


def patch_coordinates(grids: Iterable[Grid], merge: int) -> Tensor:  # [T, 2]
    """Return the row and column of each patch of some images."""
    found = []
    for height, width in grids:
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        found.append(merge_order(torch.stack([rows, columns], -1), merge))
    return torch.cat(found)


def axial_rotary_rows(coordinates: Tensor, head_dim: int, base: float) -> RotaryRows:
    """Return cosines and sines ``[T, D / 2]``: the first half turns by the row, the second by the column."""
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    frequencies = 1.0 / base**exponents  # [D / 4]
    angles = (coordinates[:, :, None].float() * frequencies).flatten(1)  # [T, D / 2]
    return angles.cos(), angles.sin()


def axial_base(config: ConfigValues, head_dim: int) -> float:
    """Return the base of the rotary embedding of a ``vision_config``.

    Raises:
        ConfigError: the section asks for another rotary embedding, or a quarter of a head is not whole.
    """
    parameters = config.section("rope_parameters")
    kind = parameters.get("rope_type")
    if kind not in (None, "axial", "default"):
        raise ConfigError("vision_config.rope_type", f"must be axial, was {kind!r}")
    if head_dim % 4:
        raise ConfigError(
            "vision_config.num_heads", f"the size of a head must be a multiple of 4, was {head_dim}"
        )
    return parameters.number("rope_theta", 10000.0)
