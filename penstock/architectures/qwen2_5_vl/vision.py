"""The vision encoder of Qwen2.5-VL (arXiv:2502.13923): windows of patches in most blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.architectures.multimodal_rope import patches_and_grid
from penstock.errors import ConfigError
from penstock.host.heartbeat import beat
from penstock.kernels import Ops
from penstock.nn import MLP, EncoderAttention, GatedMLP, Linear, Loader, RMSNorm, activation_named
from penstock.nn.grid_vision import Grid, axial_base, axial_rotary_rows, patch_coordinates
from penstock.nn.vision import VisionBlock, image_step, load_patch_embedding

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig
    from penstock.pipelines.core import ImageMetadata

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """The order of patches by windows."""

    order: Tensor  # [T] int64: the patch at each row
    inverse: Tensor  # [T / merge^2] int64: the row of each merged patch
    row_offsets: Tensor  # [W + 1] int32: the rows of each window

    @classmethod
    def of(cls, grids: Sequence[Grid], merge: int, window: int) -> WindowLayout:
        """Return the layout of some images.

        Args:
            grids: the grid of each image.
            merge: patches of a merged patch, in each direction.
            window: merged patches of a window, in each direction.
        """
        windows: list[Tensor] = []
        first = 0
        for height, width in grids:
            rows, columns = height // merge, width // merge
            merged = torch.arange(first, first + rows * columns).view(rows, columns)
            for top in range(0, rows, window):
                for left in range(0, columns, window):
                    windows.append(merged[top : top + window, left : left + window].flatten())
            first += rows * columns
        order, size = torch.cat(windows), merge * merge
        sizes = torch.tensor([0, *(len(one) * size for one in windows)])
        patches = (order[:, None] * size + torch.arange(size)).flatten()
        return cls(patches, order.argsort(), sizes.cumsum(0).int())


@dataclass(frozen=True, slots=True)
class Qwen25Vision:
    """Patch embedding, blocks with and without windows, and the layer that merges patches."""

    patches: Linear  # [C 2 p p] -> [E]
    blocks: tuple[VisionBlock, ...]
    full_blocks: frozenset[int]
    """The blocks in which a patch sees its whole image. In the others it sees its window."""
    norm: RMSNorm
    merger: MLP  # [merge^2 E] -> [E of the text model]
    head_dim: int
    base: float
    merge: int
    window: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def load(cls, load: Loader, name: str, config: HuggingFaceConfig, text_hidden: int) -> Qwen25Vision:
        """Read the encoder called ``name``.

        Raises:
            ConfigError: the configuration contradicts itself.
        """
        hidden, heads, patch = (
            config.integer("hidden_size"),
            config.integer("num_heads"),
            config.integer("patch_size"),
        )
        merge, out = config.integer("spatial_merge_size", 2), config.integer("out_hidden_size")
        if out != text_hidden:
            raise ConfigError(
                "vision_config.out_hidden_size", f"is {out}, but the text model has hidden_size {text_hidden}"
            )
        if hidden % heads:
            raise ConfigError("vision_config.num_heads", f"{heads} heads do not divide hidden_size {hidden}")
        dim, inner = hidden // heads, config.integer("intermediate_size")
        shape = (
            hidden,
            config.integer("in_channels", 3),
            config.integer("temporal_patch_size", 2),
            patch,
            patch,
        )
        activation = activation_named(config.get("hidden_act") or "silu", "vision_config.hidden_act")

        def block(index: int) -> VisionBlock:
            path = f"{name}.blocks.{index}"
            return VisionBlock(
                load.norm(f"{path}.norm1", hidden, _NORM_EPS),
                EncoderAttention(
                    load.linear(f"{path}.attn.qkv", 3 * hidden, hidden, bias=True),
                    load.linear(f"{path}.attn.proj", hidden, hidden, bias=True),
                    heads,
                    heads,
                    dim,
                    dim**-0.5,
                    rotary=0,
                ),
                load.norm(f"{path}.norm2", hidden, _NORM_EPS),
                GatedMLP.load(load, f"{path}.mlp", hidden, inner, activation, bias=True),
            )

        wide = hidden * merge * merge
        return cls(
            load_patch_embedding(load, f"{name}.patch_embed.proj", shape, bias=False),
            tuple(block(index) for index in range(config.integer("depth"))),
            frozenset(config.integers("fullatt_block_indexes") or (7, 15, 23, 31)),
            load.norm(f"{name}.merger.ln_q", hidden, _NORM_EPS),
            MLP(
                load.linear(f"{name}.merger.mlp.0", wide, wide, bias=True),
                load.linear(f"{name}.merger.mlp.2", out, wide, bias=True),
                "gelu",
            ),
            dim,
            axial_base(config, dim),
            merge,
            max(1, config.integer("window_size", 112) // merge // patch),
            load.device,
            load.dtype,
        )

    def __call__(self, images: Sequence[ImageMetadata], ops: Ops) -> list[Tensor]:
        """Return the embeddings ``[embedding_rows, E]`` of each image."""
        return [self.encode(*patches_and_grid(image, self.device, self.dtype), ops) for image in images]

    def encode(self, patches: Tensor, grids: Sequence[Grid], ops: Ops) -> Tensor:
        """Return the merged rows ``[T / merge^2, E]`` of images.

        Args:
            patches: ``[T, C 2 p p]``, in the order of `penstock.nn.grid_vision`.
            grids: the grid of each image.
            ops: the operations.
        """
        device = patches.device
        layout = WindowLayout.of(grids, self.merge, self.window)
        order = layout.order.to(device)
        images = image_step(ops, [height * width for height, width in grids], device)
        offsets = layout.row_offsets.to(device)
        windows = replace(images, row_offsets=offsets, blocks=ops.sequence_blocks(offsets))
        coordinates = patch_coordinates(grids, self.merge)[layout.order]
        cos, sin = axial_rotary_rows(coordinates, self.head_dim, self.base)
        rows = ((cos.to(device), sin.to(device)),)
        x, residual = self.patches(ops.take_rows(patches, order), images), None
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual, images if index in self.full_blocks else windows, rows)
            beat()
        normed, _ = self.norm.add(x, residual, images)
        merged = self.merger(normed.view(-1, self.merge**2 * normed.shape[1]), images)
        return ops.take_rows(merged, layout.inverse.to(device))
