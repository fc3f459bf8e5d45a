"""Spans: the images of a step whose tokens attend to each other in both directions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SpanPart:
    """S runs of consecutive rows of a step. The attention kernel processes each run as a sequence."""

    rows: Tensor  # [R] int64: the rows of all runs, as indices of the step's rows
    row_offsets: Tensor  # [S + 1] int32: run s has the entries row_offsets[s]:row_offsets[s + 1] of `rows`
    lengths: Tensor  # [S] int32: keys of the sequence up to the end of each run
    sequences: Tensor  # [S] int64: the sequence of the step to which each run belongs
    keys_ahead: int
    """Upper bound of the number of keys after its position that a row sees; 0 for rows of text."""


@dataclass(frozen=True)
class ImageSpans:
    """The images to which the rows of a step belong. All layers of the step share one instance."""

    bounds: Tensor
    """[T, 2] int32: the span of row t consists of the tokens ``bounds[t, 0]:bounds[t, 1]`` of its sequence.
    The span of a row of text has length 1."""
    row_offsets: Tensor  # [B + 1] int32, see `StepInputs`
    lengths: Tensor  # [B] int32, see `KVCacheInputs`

    @cached_property
    def parts(self) -> tuple[SpanPart, ...]:
        """The runs of text rows, and the images, as two parts. A kernel call has only one `keys_ahead`.

        Rows of text see no key after their position. Rows of an image also see all keys of the image. Each
        run of text rows and each image becomes a sequence whose keys end at its last row. A part without rows
        is left out.
        """
        return _make_parts(self.row_offsets, self.lengths, self.bounds)


def _make_parts(row_offsets: Tensor, lengths: Tensor, spans: Tensor) -> tuple[SpanPart, ...]:
    """Return the value of `ImageSpans.parts`."""
    offsets = row_offsets.numpy().astype(np.int64)
    row_counts = np.diff(offsets)
    sequences = np.arange(len(row_counts)).repeat(row_counts)  # [T]
    positions = np.arange(offsets[-1]) + (lengths.numpy() - offsets[1:]).repeat(row_counts)  # [T]
    starts, ends = spans.numpy().astype(np.int64).T
    is_image = ends - starts > 1
    run_keys = np.stack([sequences, is_image, starts * is_image])  # [3, T]: equal within a run
    run_starts = np.flatnonzero(np.append(True, (np.diff(run_keys) != 0).any(0)))
    run_ends = np.append(run_starts[1:], offsets[-1])
    return tuple(
        _make_part(run_starts[in_part], run_ends[in_part], sequences, positions, has_images)
        for has_images in (False, True)
        if (in_part := is_image[run_starts] == has_images).any()
    )


def _make_part(
    run_starts: npt.NDArray[np.int64],
    run_ends: npt.NDArray[np.int64],
    sequences: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    has_images: bool,
) -> SpanPart:
    """Return the part that consists of the given runs of rows.

    Args:
        run_starts: ``[S]``, the first row of each run.
        run_ends: ``[S]``, the row after each run.
        sequences: ``[T]``, the sequence of each row.
        positions: ``[T]``, the position of each row in its sequence.
        has_images: whether the runs are images.
    """
    rows = np.concatenate([np.arange(start, end) for start, end in zip(run_starts, run_ends, strict=True)])
    run_lengths = run_ends - run_starts
    return SpanPart(
        torch.from_numpy(rows),
        torch.from_numpy(np.append(0, run_lengths.cumsum()).astype(np.int32)),
        torch.from_numpy((positions[run_ends - 1] + 1).astype(np.int32)),
        torch.from_numpy(sequences[run_starts]),
        int(run_lengths.max()) if has_images else 0,
    )
