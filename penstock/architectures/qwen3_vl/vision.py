"""The vision encoder of Qwen3-VL, with interpolated learned positions.

The encoder also returns the merged outputs of several blocks (deepstack, Meng et al. 2024, arXiv:2406.04334).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.architectures.multimodal_rope import patches_and_grid
from penstock.errors import ConfigError
from penstock.host.heartbeat import beat
from penstock.kernels import Ops, StepInputs
from penstock.nn import MLP, LayerNorm, Linear, Loader
from penstock.nn.grid_vision import Grid, GridSizes, order_by_square
from penstock.nn.vision import (
    EncoderRunner,
    VisionBlock,
    image_step,
    image_step_tensors,
    load_mlp,
    with_step_tensors,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig
    from penstock.pipelines.core import ImageMetadata

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class PatchMerger:
    """A norm and a feed-forward layer that merge each square of ``merge_size**2`` patches into one row."""

    norm: LayerNorm
    mlp: MLP
    width: int  # merge^2 E
    merges_first: bool
    """Whether the norm is applied to the merged row of a square instead of the row of each patch."""

    @classmethod
    def load(cls, load: Loader, name: str, sizes: GridSizes, *, merges_first: bool) -> PatchMerger:
        """Read the layer called ``name``."""
        return cls(
            load.layer_norm(f"{name}.norm", sizes.merged_size if merges_first else sizes.hidden, _NORM_EPS),
            sizes.load_merger(load, f"{name}.linear_fc1", f"{name}.linear_fc2"),
            sizes.merged_size,
            merges_first,
        )

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T / merge^2, D]
        if self.merges_first:
            return self.mlp(self.norm(x.view(-1, self.width), step), step)
        return self.mlp(self.norm(x, step).view(-1, self.width), step)


@dataclass(frozen=True, slots=True)
class Qwen3Vision:
    """Patch embedding, positions, blocks, and the layers that merge patches."""

    patch_embedding: Linear  # [C 2 p p] -> [E]
    position_table: Tensor  # [side, side, E]
    blocks: tuple[VisionBlock, ...]
    merger: PatchMerger
    deepstack: tuple[tuple[int, PatchMerger], ...]
    """Pairs of block index and merger, ordered by block index. The merged output of the n-th of these blocks
    is added to the output of decoder layer n.
    """
    sizes: GridSizes
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def load(cls, load: Loader, name: str, config: HuggingFaceConfig, text_hidden: int) -> Qwen3Vision:
        """Read the encoder called ``name``.

        Raises:
            ConfigError: the sizes, the number of position embeddings or the deepstack blocks are invalid.
        """
        sizes = GridSizes.from_huggingface(config, text_hidden)
        hidden, depth, inner = sizes.hidden, sizes.depth, config.integer("intermediate_size")
        num_positions = config.integer("num_position_embeddings", 2304)
        side = round(num_positions**0.5)
        deepstack_indices = config.integers("deepstack_visual_indexes") or ()
        if side * side != num_positions:
            raise ConfigError(
                "vision_config.num_position_embeddings", f"must be a square, was {num_positions}"
            )
        if any(not 0 <= index < depth for index in deepstack_indices) or len(set(deepstack_indices)) < len(
            deepstack_indices
        ):
            raise ConfigError(
                "vision_config.deepstack_visual_indexes",
                f"must be different blocks from 0 to {depth - 1}, were "
                f"{', '.join(map(str, deepstack_indices))}",
            )
        activation = config.get("hidden_act") or "gelu_pytorch_tanh"

        def block(index: int) -> VisionBlock:
            path = f"{name}.blocks.{index}"
            return VisionBlock(
                load.layer_norm(f"{path}.norm1", hidden, _NORM_EPS),
                sizes.load_attention(load, f"{path}.attn"),
                load.layer_norm(f"{path}.norm2", hidden, _NORM_EPS),
                load_mlp(load, f"{path}.mlp", hidden, inner, activation, up="linear_fc1", down="linear_fc2"),
            )

        def merger(path: str, *, merges_first: bool) -> PatchMerger:
            return PatchMerger.load(load, f"{name}.{path}", sizes, merges_first=merges_first)

        return cls(
            sizes.load_patches(load, f"{name}.patch_embed.proj", bias=True),
            load.tensor(f"{name}.pos_embed.weight", num_positions, hidden).view(side, side, hidden),
            tuple(block(index) for index in range(depth)),
            merger("merger", merges_first=False),
            tuple(
                (index, merger(f"deepstack_merger_list.{deepstack_indices.index(index)}", merges_first=True))
                for index in sorted(deepstack_indices)
            ),
            sizes,
            load.device,
            load.dtype,
        )

    def __call__(self, images: Sequence[ImageMetadata], run: EncoderRunner) -> list[Tensor]:
        """Return rows ``[embedding_rows, (1 + N) D]`` of each image, see `encode`."""
        return [self.encode(*patches_and_grid(image, self.device, self.dtype), run) for image in images]

    def encode(self, patches: Tensor, grids: Sequence[Grid], run: EncoderRunner) -> Tensor:
        """Return rows ``[T / merge^2, (1 + N) D]`` of images; D is the hidden size of the decoder.

        The first D columns are the embeddings. The other columns are the outputs of the N deepstack mergers.

        Args:
            patches: ``[T, C 2 p p]``, in the order of `penstock.nn.grid_vision`.
            grids: the grid of each image.
            run: runs the forward, eagerly or as a captured graph.
        """
        device = patches.device
        step = image_step(run.ops, [height * width for height, width in grids], device)
        cos, sin = self.sizes.rotary_rows(grids, device)
        mergers = dict(self.deepstack)

        def forward(ops: Ops, tensors: Mapping[str, Tensor]) -> Iterable[Tensor]:
            forward_step, rows = with_step_tensors(step, ops, tensors), ((tensors["cos"], tensors["sin"]),)
            embeddings = self.patch_embedding(tensors["patches"], forward_step)
            x, residual = ops.add(embeddings, tensors["learned_positions"]), None
            deepstack_rows = []
            for index, block in enumerate(self.blocks):
                x, residual = block(x, residual, forward_step, rows)
                if index in mergers:
                    deepstack_rows.append(mergers[index](ops.add(x, residual), forward_step))
                beat()
            assert residual is not None
            return [self.merger(ops.add(x, residual), forward_step), *deepstack_rows]

        learned_positions = torch.cat([self.interpolate(grid) for grid in grids])
        inputs = {
            "patches": patches,
            "learned_positions": learned_positions,
            "cos": cos,
            "sin": sin,
            **image_step_tensors(step),
        }
        return torch.cat(run((id(self), *grids), inputs, forward), dim=1)

    def interpolate(self, grid: Grid) -> Tensor:
        """Return the learned positions ``[h w, E]`` of a grid, bilinearly interpolated."""
        height, width = grid
        table = self.position_table.float()
        (top, bottom), (left, right) = (
            _neighbors_and_weights(height, len(table)),
            _neighbors_and_weights(width, len(table)),
        )
        corners = [
            (top[0][:, None], left[0], top[1][:, None] * left[1]),
            (top[0][:, None], right[0], top[1][:, None] * right[1]),
            (bottom[0][:, None], left[0], bottom[1][:, None] * left[1]),
            (bottom[0][:, None], right[0], bottom[1][:, None] * right[1]),
        ]
        device = table.device
        interpolated = sum(
            table[rows.to(device), columns.to(device)] * weight[..., None].to(device)
            for rows, columns, weight in corners
        )
        assert isinstance(interpolated, Tensor)
        return order_by_square(interpolated, self.sizes.merge_size).to(self.position_table.dtype)


def _neighbors_and_weights(count: int, side: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the table indices below and above ``count`` evenly spaced points, each with its weight."""
    points = torch.linspace(0, side - 1, count)
    below = points.long()
    fraction = points - below
    return (below, 1 - fraction), ((below + 1).clamp(max=side - 1), fraction)
