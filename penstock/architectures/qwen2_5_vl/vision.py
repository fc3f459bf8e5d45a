"""The vision encoder of Qwen2.5-VL (arXiv:2502.13923), with windows of patches in most blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.architectures.multimodal_rope import patches_and_grid
from penstock.host.heartbeat import beat
from penstock.kernels import Ops
from penstock.nn import MLP, GatedMLP, Linear, Loader, RMSNorm, activation_named
from penstock.nn.grid_vision import Grid, GridSizes
from penstock.nn.vision import EncoderRunner, VisionBlock, image_step, image_step_tensors, with_step_tensors

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig
    from penstock.pipelines.core import ImageMetadata

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """The order of patches in the blocks: the patches of a window are adjacent."""

    order: Tensor  # [T] int64: the index of the patch in each row of the blocks' input
    inverse: Tensor  # [T / merge^2] int64: the row of each merged patch in the merger's output
    row_offsets: Tensor  # [W + 1] int32: window w has rows row_offsets[w]:row_offsets[w + 1]

    @classmethod
    def from_grids(cls, grids: Sequence[Grid], merge: int, window: int) -> WindowLayout:
        """Return the layout of the windows of images.

        Args:
            grids: the grid of each image.
            merge: patches per merged patch, in each direction.
            window: merged patches per window, in each direction.
        """
        windows: list[Tensor] = []
        first_index = 0
        for height, width in grids:
            rows, columns = height // merge, width // merge
            merged_indices = torch.arange(first_index, first_index + rows * columns).view(rows, columns)
            for top in range(0, rows, window):
                for left in range(0, columns, window):
                    windows.append(merged_indices[top : top + window, left : left + window].flatten())
            first_index += rows * columns
        merged_order, square = torch.cat(windows), merge * merge
        window_sizes = torch.tensor([0, *(len(merged_patches) * square for merged_patches in windows)])
        patch_order = (merged_order[:, None] * square + torch.arange(square)).flatten()
        return cls(patch_order, merged_order.argsort(), window_sizes.cumsum(0).int())


@dataclass(frozen=True, slots=True)
class Qwen25Vision:
    """Patch embedding, blocks with and without windows, and the layer that merges patches."""

    patch_embedding: Linear  # [C 2 p p] -> [E]
    blocks: tuple[VisionBlock, ...]
    full_attention_blocks: frozenset[int]
    """The indices of blocks with full attention within an image. In all other blocks, a patch attends to the
    patches of its window."""
    norm: RMSNorm
    merger: MLP  # [merge^2 E] -> [D], D: the hidden size of the text model
    sizes: GridSizes
    window: int  # merged patches per window, in each direction
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def load(cls, load: Loader, name: str, config: HuggingFaceConfig, text_hidden: int) -> Qwen25Vision:
        """Read the encoder called ``name``.

        Raises:
            ConfigError: the sizes are invalid; see `GridSizes.from_huggingface`.
        """
        sizes = GridSizes.from_huggingface(config, text_hidden)
        hidden, inner = sizes.hidden, config.integer("intermediate_size")
        activation = activation_named(config.get("hidden_act") or "silu", "vision_config.hidden_act")

        def block(index: int) -> VisionBlock:
            path = f"{name}.blocks.{index}"
            return VisionBlock(
                load.norm(f"{path}.norm1", hidden, _NORM_EPS),
                sizes.load_attention(load, f"{path}.attn"),
                load.norm(f"{path}.norm2", hidden, _NORM_EPS),
                GatedMLP.load(load, f"{path}.mlp", hidden, inner, activation, bias=True),
            )

        return cls(
            sizes.load_patches(load, f"{name}.patch_embed.proj", bias=False),
            tuple(block(index) for index in range(sizes.depth)),
            frozenset(config.integers("fullatt_block_indexes") or (7, 15, 23, 31)),
            load.norm(f"{name}.merger.ln_q", hidden, _NORM_EPS),
            sizes.load_merger(load, f"{name}.merger.mlp.0", f"{name}.merger.mlp.2"),
            sizes,
            max(1, config.integer("window_size", 112) // sizes.merge_size // sizes.patch_size),
            load.device,
            load.dtype,
        )

    def __call__(self, images: Sequence[ImageMetadata], run: EncoderRunner) -> list[Tensor]:
        """Return the embeddings ``[embedding_rows, D]`` of each image."""
        return [self.encode(*patches_and_grid(image, self.device, self.dtype), run) for image in images]

    def encode(self, patches: Tensor, grids: Sequence[Grid], run: EncoderRunner) -> Tensor:
        """Return the merged rows ``[T / merge^2, D]`` of images.

        Args:
            patches: ``[T, C 2 p p]``, in the order of `penstock.nn.grid_vision`.
            grids: the grid of each image.
            run: runs the forward, eagerly or as a captured graph.
        """
        device = patches.device
        layout = WindowLayout.from_grids(grids, self.sizes.merge_size, self.window)
        step = image_step(run.ops, [height * width for height, width in grids], device)
        offsets = layout.row_offsets.to(device)
        blocks = run.ops.sequence_blocks(offsets)
        cos, sin = self.sizes.rotary_rows(grids, device, layout.order)

        def forward(ops: Ops, tensors: Mapping[str, Tensor]) -> Iterable[Tensor]:
            full_step, rows = with_step_tensors(step, ops, tensors), ((tensors["cos"], tensors["sin"]),)
            window_step = replace(full_step, row_offsets=tensors["window_offsets"], blocks=blocks)
            x, residual = (
                self.patch_embedding(ops.take_rows(tensors["patches"], tensors["order"]), full_step),
                None,
            )
            for index, block in enumerate(self.blocks):
                block_step = full_step if index in self.full_attention_blocks else window_step
                x, residual = block(x, residual, block_step, rows)
                beat()
            normalized, _ = self.norm.add(x, residual, full_step)
            merged = self.merger(normalized.view(-1, self.sizes.merged_size), full_step)
            return [ops.take_rows(merged, tensors["inverse"])]

        inputs = {
            "patches": patches,
            "order": layout.order.to(device),
            "inverse": layout.inverse.to(device),
            "window_offsets": offsets,
            "cos": cos,
            "sin": sin,
            **image_step_tensors(step),
        }
        return run((id(self), *grids), inputs, forward)[0]
