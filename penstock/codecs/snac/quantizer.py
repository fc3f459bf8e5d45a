"""The residual vector quantizer of SNAC: each codebook encodes the residual of the coarser codebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.codecs.layers import CodecLoader
from penstock.codecs.snac.config import SnacConfig
from penstock.kernels import Ops, PackedLinear


@dataclass(frozen=True, slots=True)
class Codebook:
    """A codebook with its input and output projections."""

    project_in: PackedLinear  # [latent] -> [codebook_dim]
    project_out: PackedLinear  # [codebook_dim] -> [latent]
    table: Tensor  # [codebook_size, codebook_dim]
    stride: int

    def latents(self, codes: Tensor, ops: Ops) -> Tensor:
        """Return the latent rows of codes: ``[N] -> [N * stride, latent]``."""
        rows = ops.linear(ops.embedding(codes, self.table), self.project_out)
        return ops.take_rows(rows, torch.arange(len(rows) * self.stride) // self.stride)

    def nearest_codes(self, latents: Tensor, ops: Ops) -> Tensor:
        """Return the nearest code of each group of ``stride`` rows: ``[N * stride, latent] -> [N]``."""
        # The nearest code has the smallest angle between its vector and the projected mean of the rows.
        means = latents.view(-1, self.stride, latents.shape[1]).mean(1)
        queries = F.normalize(ops.linear(means, self.project_in))
        return (queries @ F.normalize(self.table).t()).argmax(1)


@dataclass(frozen=True, slots=True)
class Quantizer:
    """All codebooks, the coarsest one first, and the order of their codes in a frame."""

    codebooks: tuple[Codebook, ...]
    columns: tuple[Tensor, ...]
    """For each codebook, the columns of a frame that contain its codes, int64."""

    def latents(self, frames: Tensor, ops: Ops) -> Tensor:
        """Return the latent rows of frames: ``[F, C] -> [F * strides[0], latent]``."""
        total: Tensor | None = None
        for codebook, columns in zip(self.codebooks, self.columns, strict=True):
            rows = codebook.latents(frames[:, columns].flatten(), ops)
            total = rows if total is None else ops.add(total, rows)
        assert total is not None
        return total

    def frames(self, latents: Tensor, ops: Ops) -> Tensor:
        """Return the frames that encode latent rows: ``[F * strides[0], latent] -> [F, C]``."""
        num_frames = len(latents) // self.codebooks[0].stride
        frames = torch.empty(num_frames, sum(map(len, self.columns)), dtype=torch.int64)
        residual = latents
        for codebook, columns in zip(self.codebooks, self.columns, strict=True):
            codes = codebook.nearest_codes(residual, ops)
            frames[:, columns] = codes.view(num_frames, -1)
            residual = residual - codebook.latents(codes, ops)
        return frames


def frame_columns(strides: Sequence[int]) -> tuple[Tensor, ...]:
    """Return for each codebook the columns of a frame that contain its codes.

    The codes are sorted by the latent row at which they begin. Codes with the same row are sorted from coarse
    to fine.
    """
    column_codebooks = [
        codebook for row in range(strides[0]) for codebook, stride in enumerate(strides) if row % stride == 0
    ]
    return tuple(
        torch.tensor([column for column, index in enumerate(column_codebooks) if index == codebook])
        for codebook in range(len(strides))
    )


def read_quantizer(loader: CodecLoader, config: SnacConfig) -> Quantizer:
    """Read the tensors ``quantizer.*``."""
    codebooks = []
    for level, stride in enumerate(config.strides):
        name = f"quantizer.quantizers.{level}"
        table = loader.tensor(f"{name}.codebook.weight", config.codebook_size, config.codebook_dim)
        projections = (
            loader.pointwise(f"{name}.in_proj", config.latent_dim, config.codebook_dim),
            loader.pointwise(f"{name}.out_proj", config.codebook_dim, config.latent_dim),
        )
        codebooks.append(Codebook(*projections, table.contiguous(), stride))
    return Quantizer(tuple(codebooks), frame_columns(config.strides))
