"""`AudioCodec`: codes to waveforms and back. A codec is a folder of this package, see `codecs.registry`.

A codec holds weights and no state of a request. A stream is decoded in chunks: each chunk brings the frames
before it that its samples depend on (`AudioCodec.left_context`), and the frames after it
(`AudioCodec.right_context`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class CodecChunk:
    """Consecutive frames of a stream. The frames between ``left`` and ``right`` are to be decoded.

    The frames at the edges are context. The left context has `AudioCodec.left_context` frames, or all frames
    from the start of the stream if there are fewer. The right context has `AudioCodec.right_context` frames;
    fewer mean that the stream ends after the last frame.
    """

    frames: Tensor
    """``[left + n + right, C]`` int64."""
    start: int = 0
    """Index in the stream of the first frame to decode, ``frames[left]``."""
    left: int = 0
    """Number of frames of left context."""
    right: int = 0
    """Number of frames of right context."""

    @property
    def num_frames(self) -> int:
        """Number of frames to decode, without context."""
        return len(self.frames) - self.left - self.right


class AudioCodec(ABC):
    """Decodes frames of codes to samples, and encodes samples to frames.

    A frame holds ``codes_per_frame`` codes, C. The codes of a frame stand in the order in which a language
    model writes them; flattened frames are the speech tokens of a context.
    """

    name: str
    """Name of the codec, which is the name of its folder."""
    sample_rate: int
    """Samples per second of decoded audio."""
    encoder_sample_rate: int
    """Samples per second that `encode` expects."""
    codes_per_frame: int
    """Codes of one frame, C."""
    samples_per_frame: int
    """Decoded samples of one frame."""
    codebook_size: int
    """Codes are between 0 and ``codebook_size - 1``."""
    left_context: int
    """Frames before a chunk that its samples depend on."""
    right_context: int
    """Frames after a chunk that its samples depend on; 0 in a causal codec."""
    tolerance: float
    """Bound of the absolute difference between a sample decoded in chunks and the same sample of a stream
    that is decoded as one chunk."""

    @property
    def frame_rate(self) -> float:
        """Frames per second."""
        return self.sample_rate / self.samples_per_frame

    @property
    def can_encode(self) -> bool:
        """Whether the checkpoint has an encoder."""
        return False

    def decode(self, frames: Sequence[Tensor]) -> list[Tensor]:
        """Decode whole streams; each ``[F, C]`` int64 -> ``[F * samples_per_frame]`` float32.

        Raises:
            InputError: frames have another shape, or a code is out of range.
        """
        return self.decode_chunks([CodecChunk(one) for one in frames])

    @abstractmethod
    def decode_chunks(self, chunks: Sequence[CodecChunk]) -> list[Tensor]:
        """Decode one chunk of each of several streams.

        Returns:
            ``[n * samples_per_frame]`` float32 of each chunk: the samples of its frames without context.
            They do not depend on the other chunks.

        Raises:
            InputError: frames have another shape, or a code is out of range.
        """

    @abstractmethod
    def encode(self, samples: Tensor) -> Tensor:
        """Encode ``[S]`` float32 at ``encoder_sample_rate`` -> ``[F, C]`` int64.

        Raises:
            UnsupportedFeatureError: the checkpoint has no encoder.
        """

    def check_chunk(self, chunk: CodecChunk) -> None:
        """Check the left context of a chunk, and shape, type and range of its frames.

        Raises:
            InputError: names the expected and the found values.
        """
        frames, needed = chunk.frames, min(chunk.start, self.left_context)
        if not needed <= chunk.left <= chunk.start or chunk.num_frames < 0:
            raise InputError(
                f"{self.name}: a chunk that starts at frame {chunk.start} needs {needed} frames of left "
                f"context, has {chunk.left} in {len(frames)} frames: keep {self.left_context} decoded frames"
            )
        if frames.dim() != 2 or frames.shape[1] != self.codes_per_frame or frames.dtype != torch.int64:
            raise InputError(
                f"{self.name}: frames must be int64 of shape [F, {self.codes_per_frame}], were "
                f"{frames.dtype} of shape {list(frames.shape)}: reshape the speech tokens to frames"
            )
        if len(frames) and not 0 <= int(frames.min()) <= int(frames.max()) < self.codebook_size:
            raise InputError(
                f"{self.name}: codes must be from 0 to {self.codebook_size - 1}, were from "
                f"{int(frames.min())} to {int(frames.max())}: subtract the offsets of the speech tokens"
            )

    def cut(self, frames: Tensor, chunk_frames: int) -> Iterator[CodecChunk]:
        """Yield the chunks of a finished stream ``[F, C]``, each of at most ``chunk_frames`` frames."""
        for start in range(0, len(frames), chunk_frames):
            stop = min(start + chunk_frames, len(frames))
            left = min(start, self.left_context)
            right = min(len(frames) - stop, self.right_context)
            yield CodecChunk(frames[start - left : stop + right], start, left, right)
