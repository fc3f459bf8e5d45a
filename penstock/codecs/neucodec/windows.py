"""Blocks and windows: the ranges of frames in which an incomplete stream is decoded.

A stream is divided into blocks at fixed positions, regardless of the sizes of its chunks. The first blocks
are short, so that the first samples are available early. A window is a block with some frames before and
after it, which are decoded together. The first `RIGHT_CONTEXT` frames of a block are also the right context
of the previous window. The samples of these frames are a cross-fade of both windows.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_BLOCK_FRAMES = (10, 15, 20, 30, 40)
"""Numbers of frames of the first blocks."""
BLOCK_FRAMES = 50
"""Number of frames of each block after the `FIRST_BLOCK_FRAMES`."""
LEFT_CONTEXT = 25
"""Number of frames of a window before its block."""
RIGHT_CONTEXT = 5
"""Number of frames of a window after its block; also the length of the cross-fade."""


@dataclass(frozen=True, slots=True)
class FrameBlock:
    """A block of a stream: its frames ``start`` to ``stop - 1``."""

    index: int
    start: int
    stop: int

    @property
    def window(self) -> tuple[int, int]:
        """The range ``(first, end)`` of frames to decode for the block. ``end`` can exceed the stream."""
        return max(self.start - LEFT_CONTEXT, 0), self.stop + RIGHT_CONTEXT


def frame_block(index: int) -> FrameBlock:
    """Return the block with this index in the stream."""
    start = sum(FIRST_BLOCK_FRAMES[:index]) + max(index - len(FIRST_BLOCK_FRAMES), 0) * BLOCK_FRAMES
    return FrameBlock(
        index, start, start + (FIRST_BLOCK_FRAMES[index] if index < len(FIRST_BLOCK_FRAMES) else BLOCK_FRAMES)
    )


def block_at(frame: int) -> FrameBlock:
    """Return the block that contains a frame."""
    index = max(frame - sum(FIRST_BLOCK_FRAMES), 0) // BLOCK_FRAMES + len(FIRST_BLOCK_FRAMES)
    while frame_block(index).start > frame:
        index -= 1
    return frame_block(index)
