"""Images of a step whose tokens attend to each other in both directions (spans)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SpanPart:
    """Runs of consecutive rows of a step. The attention kernel processes each run as a sequence."""

    rows: Tensor  # [R] int64: the rows of the step
    row_offsets: Tensor  # [S + 1] int32
    lengths: Tensor  # [S] int32
    sequences: Tensor  # [S] int64: for each run, its sequence of the step
    keys_ahead: int
    """Upper bound of the number of keys after its position that a row can see; 0 for rows of text."""


@dataclass(frozen=True)
class ImageSpans:
    """The images to which the rows of a step belong. All layers of the step share this object."""

    bounds: Tensor
    """[T, 2] int32: row t belongs to the tokens ``bounds[t, 0]:bounds[t, 1]`` of its sequence. A row of text
    is a span of length 1."""
    row_offsets: Tensor  # [B + 1] int32, see `StepInputs`
    lengths: Tensor  # [B] int32, see `KVCacheInputs`

    @cached_property
    def parts(self) -> tuple[SpanPart, ...]:
        """The text rows and the image rows as separate parts, because a kernel call has one `keys_ahead`.

        Rows of text see no key after their position. Rows of an image see all keys of the image. Each run of
        text and each image becomes a sequence that ends with its last key. Empty parts are left out.
        """
        return _make_parts(self.row_offsets, self.lengths, self.bounds)


def _make_parts(row_offsets: Tensor, lengths: Tensor, spans: Tensor) -> tuple[SpanPart, ...]:
    """Return the parts of `ImageSpans.parts`."""
    offsets = row_offsets.numpy().astype(np.int64)
    counts = np.diff(offsets)
    sequences = np.arange(len(counts)).repeat(counts)  # [T]
    positions = np.arange(offsets[-1]) + (lengths.numpy() - offsets[1:]).repeat(counts)  # [T]
    starts, ends = spans.numpy().astype(np.int64).T
    is_image = ends - starts > 1
    keys = np.stack([sequences, is_image, starts * is_image])  # [3, T]: equal within a run
    firsts = np.flatnonzero(np.append(True, (np.diff(keys) != 0).any(0)))
    lasts = np.append(firsts[1:], offsets[-1])
    return tuple(
        _make_part(firsts[chosen], lasts[chosen], sequences, positions, has_images)
        for has_images in (False, True)
        if (chosen := is_image[firsts] == has_images).any()
    )


def _make_part(
    firsts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    sequences: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    has_images: bool,
) -> SpanPart:
    """Return the part that consists of the given runs of rows.

    Args:
        firsts: ``[S]``, the first row of each run.
        ends: ``[S]``, the row after each run.
        sequences: ``[T]``, the sequence of each row.
        positions: ``[T]``, the position of each row in its sequence.
        has_images: whether the runs are images.
    """
    rows = np.concatenate([np.arange(first, end) for first, end in zip(firsts, ends, strict=True)])
    counts = ends - firsts
    return SpanPart(
        torch.from_numpy(rows),
        torch.from_numpy(np.append(0, counts.cumsum()).astype(np.int32)),
        torch.from_numpy((positions[ends - 1] + 1).astype(np.int32)),
        torch.from_numpy(sequences[firsts]),
        int(counts.max()) if has_images else 0,
    )
