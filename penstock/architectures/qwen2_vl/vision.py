"""The vision encoder of Qwen2-VL (arXiv:2409.12191): each patch attends to its whole image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.architectures.multimodal_rope import patches_and_grid
from penstock.host.heartbeat import beat
from penstock.kernels import Ops
from penstock.nn import MLP, LayerNorm, Linear, Loader
from penstock.nn.grid_vision import Grid, GridSizes
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
class Qwen2Vision:
    """Patch embedding, blocks, and the layer that merges patches."""

    patch_embedding: Linear  # [C 2 p p] -> [E]
    blocks: tuple[VisionBlock, ...]
    norm: LayerNorm
    merger: MLP  # [merge^2 E] -> [E of the text model]
    sizes: GridSizes
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def load(cls, load: Loader, name: str, config: HuggingFaceConfig, text_hidden: int) -> Qwen2Vision:
        """Read the encoder called ``name``.

        Raises:
            ConfigError: the sizes are invalid; see `GridSizes.from_huggingface`.
        """
        sizes = GridSizes.from_huggingface(config, text_hidden, hidden_key="embed_dim", out_key="hidden_size")
        hidden, inner = sizes.hidden, sizes.hidden * config.integer("mlp_ratio")
        activation = config.get("hidden_act") or "quick_gelu"

        def block(index: int) -> VisionBlock:
            path = f"{name}.blocks.{index}"
            return VisionBlock(
                load.layer_norm(f"{path}.norm1", hidden, _NORM_EPS),
                sizes.load_attention(load, f"{path}.attn"),
                load.layer_norm(f"{path}.norm2", hidden, _NORM_EPS),
                load_mlp(load, f"{path}.mlp", hidden, inner, activation),
            )

        return cls(
            sizes.load_patches(load, f"{name}.patch_embed.proj", bias=False),
            tuple(block(index) for index in range(sizes.depth)),
            load.layer_norm(f"{name}.merger.ln_q", hidden, _NORM_EPS),
            sizes.load_merger(load, f"{name}.merger.mlp.0", f"{name}.merger.mlp.2"),
            sizes,
            load.device,
            load.dtype,
        )

    def __call__(self, images: Sequence[ImageMetadata], run: EncoderRunner) -> list[Tensor]:
        """Return the embeddings ``[embedding_rows, E of the text model]`` of each image."""
        return [self.encode(*patches_and_grid(image, self.device, self.dtype), run) for image in images]

    def encode(self, patches: Tensor, grids: Sequence[Grid], run: EncoderRunner) -> Tensor:
        """Return the merged rows ``[T / merge^2, E of the text model]`` of images.

        Args:
            patches: ``[T, C 2 p p]``, in the order of `penstock.nn.grid_vision`.
            grids: the grid of each image.
            run: runs the forward, eagerly or as a captured graph.
        """
        device = patches.device
        step = image_step(run.ops, [height * width for height, width in grids], device)
        cos, sin = self.sizes.rotary_rows(grids, device)

        def forward(ops: Ops, tensors: Mapping[str, Tensor]) -> Iterable[Tensor]:
            forward_step, rows = with_step_tensors(step, ops, tensors), ((tensors["cos"], tensors["sin"]),)
            x, residual = self.patch_embedding(tensors["patches"], forward_step), None
            for block in self.blocks:
                x, residual = block(x, residual, forward_step, rows)
                beat()
            normalized, _ = self.norm.add(x, residual, forward_step)
            return [self.merger(normalized.view(-1, self.sizes.merged_size), forward_step)]

        inputs = {"patches": patches, "cos": cos, "sin": sin, **image_step_tensors(step)}
        return run((id(self), *grids), inputs, forward)[0]
