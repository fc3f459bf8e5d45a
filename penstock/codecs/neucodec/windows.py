"""The windows in which a stream is decoded, because the decoder would otherwise need all of its frames.

A stream is cut into blocks at fixed positions, regardless of the sizes of its chunks. The first blocks are
short, so that the first samples are ready early. A block is decoded with some frames before and after it. At
the start of a block, its samples are blended with those of the window before it, which has decoded these
frames as its right context.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_BLOCKS = (10, 15, 20, 30, 40)
"""Frames of the first blocks."""
BLOCK = 50
"""Frames of the other blocks."""
LEFT = 25
"""Frames of a window before its block."""
RIGHT = 5
"""Frames of a window after its block, over which two windows are blended."""


@dataclass(frozen=True, slots=True)
class FrameBlock:
    """Frames ``start`` to ``stop - 1`` of a stream."""

    index: int
    start: int
    stop: int

    @property
    def window(self) -> tuple[int, int]:
        """The first frame that is decoded with the block, and the end. The end may exceed the stream."""
        return max(self.start - LEFT, 0), self.stop + RIGHT


def block(index: int) -> FrameBlock:
    """Return a block by its number in the stream."""
    start = sum(FIRST_BLOCKS[:index]) + max(index - len(FIRST_BLOCKS), 0) * BLOCK
    return FrameBlock(index, start, start + (FIRST_BLOCKS[index] if index < len(FIRST_BLOCKS) else BLOCK))


def block_at(frame: int) -> FrameBlock:
    """Return the block of a frame."""
    index = max(frame - sum(FIRST_BLOCKS), 0) // BLOCK + len(FIRST_BLOCKS)
    while block(index).start > frame:
        index -= 1
    return block(index)
