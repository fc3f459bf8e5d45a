"""Patch order and positions in vision encoders for images of any size (Wang et al. 2024, arXiv:2409.12191).

An image is a grid of patches. Each patch is one input row. Each square of ``merge_size**2`` patches
becomes one output row. The patches of a square are adjacent input rows. Squares are ordered from left to
right within a row of squares, and the rows from top to bottom. Patches within a square are ordered likewise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.nn.config_values import ConfigValues
from penstock.nn.encoder import EncoderAttention
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader
from penstock.nn.mlp import MLP
from penstock.nn.rotary import RotaryRows
from penstock.nn.vision import load_patch_embedding

Grid = tuple[int, int]
"""The size of an image in patches: height and width."""


def order_by_square(values: Tensor, merge_size: int) -> Tensor:
    """Return the values ``[h, w, ...]`` of a grid of patches as rows ``[h w, ...]``, ordered by square."""
    height, width, *other_dims = values.shape
    squares = values.reshape(height // merge_size, merge_size, width // merge_size, merge_size, *other_dims)
    return squares.transpose(1, 2).reshape(height * width, *other_dims)


def patch_coordinates(grids: Iterable[Grid], merge_size: int) -> Tensor:  # [T, 2]
    """Return the grid row and grid column of each patch of the images, ordered by square."""
    coordinates = []
    for height, width in grids:
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        coordinates.append(order_by_square(torch.stack([rows, columns], -1), merge_size))
    return torch.cat(coordinates)


def axial_rotary_rows(coordinates: Tensor, head_dim: int, base: float) -> RotaryRows:
    """Return cosines and sines ``[T, D / 2]`` for T patches. D is ``head_dim``.

    The first half of the columns encodes the first coordinate, the second half the second coordinate.
    """
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    frequencies = 1.0 / base**exponents  # [D / 4]
    angles = (coordinates[:, :, None].float() * frequencies).flatten(1)  # [T, D / 2]
    return angles.cos(), angles.sin()


def axial_base(config: ConfigValues, head_dim: int, default: float = 10000.0) -> float:
    """Return the base of the rotary embedding of a ``vision_config``, or ``default`` if it has none.

    Raises:
        ConfigError: the rope type is neither "axial" nor "default", or the head size is not a multiple of 4.
    """
    parameters = config.section("rope_parameters")
    rope_type = parameters.get("rope_type")
    if rope_type not in (None, "axial", "default"):
        raise ConfigError("vision_config.rope_type", f"must be axial or default, was {rope_type!r}")
    if head_dim % 4:
        raise ConfigError(
            "vision_config.num_heads", f"the size of a head must be a multiple of 4, was {head_dim}"
        )
    return parameters.number("rope_theta", default)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSizes:
    """Sizes of the vision encoders of the Qwen families, read from a ``vision_config``."""

    hidden: int  # E
    output_size: int  # the hidden size of the decoder
    depth: int  # number of blocks
    heads: int
    channels: int  # C
    frames_per_patch: int  # f: video frames per patch; an image is used as f equal frames
    patch_size: int  # p
    merge_size: int  # side of the square of patches that becomes one output row
    rope_theta: float  # base of the rotary embedding

    @classmethod
    def from_huggingface(
        cls,
        config: ConfigValues,
        text_hidden: int,
        *,
        hidden_key: str = "hidden_size",
        out_key: str = "out_hidden_size",
    ) -> GridSizes:
        """Read a ``vision_config``.

        Args:
            config: the section ``vision_config``.
            text_hidden: the hidden size of the decoder.
            hidden_key: the key of the encoder's hidden size E.
            out_key: the key of the size of an output row.

        Raises:
            ConfigError: the output size differs from ``text_hidden``, the heads do not divide E, or the
                rotary embedding is not supported.
        """
        hidden, heads = config.integer(hidden_key), config.integer("num_heads")
        output_size = config.integer(out_key)
        if output_size != text_hidden:
            raise ConfigError(
                f"vision_config.{out_key}",
                f"is {output_size}, but the text model has hidden_size {text_hidden}",
            )
        if hidden % heads:
            raise ConfigError("vision_config.num_heads", f"{heads} heads do not divide {hidden_key} {hidden}")
        return cls(
            hidden=hidden,
            output_size=output_size,
            depth=config.integer("depth"),
            heads=heads,
            channels=config.integer("in_channels", 3),
            frames_per_patch=config.integer("temporal_patch_size", 2),
            patch_size=config.integer("patch_size"),
            merge_size=config.integer("spatial_merge_size", 2),
            rope_theta=axial_base(config, hidden // heads),
        )

    @property
    def merged_size(self) -> int:
        """The size of the concatenated rows of a square of patches, ``merge^2 E``."""
        return self.hidden * self.merge_size**2

    def load_patches(self, load: Loader, name: str, *, bias: bool) -> Linear:
        """Return the patch embedding called ``name``, ``[C f p p] -> [E]``."""
        shape = (self.hidden, self.channels, self.frames_per_patch, self.patch_size, self.patch_size)
        return load_patch_embedding(load, name, shape, bias=bias)

    def load_attention(self, load: Loader, name: str) -> EncoderAttention:
        """Return the attention called ``name``, with one matrix for queries, keys and values."""
        dim = self.hidden // self.heads
        return EncoderAttention(
            load.linear(f"{name}.qkv", 3 * self.hidden, self.hidden, bias=True),
            load.linear(f"{name}.proj", self.hidden, self.hidden, bias=True),
            self.heads,
            self.heads,
            dim,
            dim**-0.5,
            rotary_index=0,
        )

    def load_merger(self, load: Loader, first: str, second: str) -> MLP:
        """Return the feed-forward layer that maps a square of patches to one decoder embedding.

        ``first`` and ``second`` are the full names of its two matrices.
        """
        return MLP(
            load.linear(first, self.merged_size, self.merged_size, bias=True),
            load.linear(second, self.output_size, self.merged_size, bias=True),
            "gelu",
        )

    def rotary_rows(
        self, grids: Iterable[Grid], device: torch.device, order: Tensor | None = None
    ) -> RotaryRows:
        """Return the cosines and sines ``[T, D / 2]`` of the patches of images.

        By default the rows are ordered by square. With ``order [T]``, row i of the result belongs to the
        patch that has the index ``order[i]`` in the order by square.
        """
        coordinates = patch_coordinates(grids, self.merge_size)
        coordinates = coordinates if order is None else coordinates[order]
        cos, sin = axial_rotary_rows(coordinates, self.hidden // self.heads, self.rope_theta)
        return cos.to(device), sin.to(device)
