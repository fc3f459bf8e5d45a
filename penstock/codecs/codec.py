"""`AudioCodec`: converts codes to waveforms and waveforms to codes. See `codecs.registry` for the codecs.

A codec has weights, but no per-request state. A stream of frames is decoded in chunks. A chunk includes the
surrounding frames on which its samples depend. Therefore the concatenated samples of the chunks equal the
samples of the stream decoded as one chunk, up to `AudioCodec.tolerance`. After each new frame, and at the end
of the stream:

    ready = codec.ready_frames(len(frames), ended=ended)
    if ready > decoded:
        samples += codec.decode_chunks([codec.chunk(frames, decoded, ready, ended=ended)])
        decoded = ready
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
    """Consecutive frames of a stream with context on both sides, created by `AudioCodec.chunk`.

    ``CodecChunk(frames)`` is a whole stream.
    """

    frames: Tensor
    """``[left + n + right, C]`` int64: left context, the n frames to decode, right context."""
    start: int = 0
    """The index in the stream of the first frame to decode, which is ``frames[left]``."""
    left: int = 0
    """Number of frames of left context."""
    right: int = 0
    """Number of frames of right context."""
    ended: bool = True
    """Whether the stream ends after the last frame of ``frames``."""

    @property
    def num_frames(self) -> int:
        """Number of frames to decode, without context."""
        return len(self.frames) - self.left - self.right


class AudioCodec(ABC):
    """Decodes frames of codes to samples, and encodes samples to frames.

    A frame has C codes (``codes_per_frame``), in the order in which a language model generates them. The
    flattened frames are the speech tokens of a context.
    """

    name: str
    """Name of the codec and of its folder."""
    sample_rate: int
    """Samples per second of decoded audio."""
    encoder_sample_rate: int
    """Samples per second that `encode` expects."""
    codes_per_frame: int
    """Number of codes in a frame, C."""
    samples_per_frame: int
    """Number of decoded samples of a frame."""
    codebook_size: int
    """Number of different codes; a code is between 0 and ``codebook_size - 1``."""
    left_context: int
    """Maximum number of frames before a chunk on which its samples depend."""
    right_context: int
    """Maximum number of frames after a chunk on which its samples depend; 0 in a causal codec."""
    tolerance: float
    """Maximum absolute difference between a sample of a stream decoded in chunks and the same sample of the
    stream decoded as one chunk.
    """

    @property
    def frame_rate(self) -> float:
        """Frames per second."""
        return self.sample_rate / self.samples_per_frame

    @property
    def can_encode(self) -> bool:
        """Whether the checkpoint has an encoder."""
        return False

    def decode(self, frames: Sequence[Tensor]) -> list[Tensor]:
        """Return the samples ``[F * samples_per_frame]`` float32 of each whole stream ``[F, C]`` int64.

        Raises:
            InputError: frames have another shape, or a code is out of range.
        """
        return self.decode_chunks([CodecChunk(stream) for stream in frames])

    @abstractmethod
    def decode_chunks(self, chunks: Sequence[CodecChunk]) -> list[Tensor]:
        """Decode chunks of several streams, one chunk per stream.

        Returns:
            The samples of each chunk, ``[n * samples_per_frame]`` float32, without the samples of its
            context. The samples do not depend on the other chunks of the call.

        Raises:
            InputError: frames have another shape, a code is out of range, or a chunk lacks context.
        """

    @abstractmethod
    def encode(self, samples: Tensor) -> Tensor:
        """Return the frames ``[F, C]`` int64 of samples ``[S]`` float32 at ``encoder_sample_rate``.

        Raises:
            UnsupportedFeatureError: the checkpoint has no encoder.
            InputError: the samples have another shape or type.
        """

    def check_chunk(self, chunk: CodecChunk) -> None:
        """Check the context of a chunk, and the shape, type and range of its frames.

        Raises:
            InputError: the check failed. The message contains the expected and the actual values.
        """
        frames, stop = chunk.frames, chunk.start + chunk.num_frames
        if chunk.num_frames < 0:
            raise InputError(
                f"{self.name}: the chunk has {len(frames)} frames, fewer than {chunk.left} frames of left "
                f"and {chunk.right} of right context: use AudioCodec.chunk"
            )
        first, end = self.context_at(chunk.start, stop)
        has_left = chunk.start - first <= chunk.left <= chunk.start
        has_right = chunk.ended or chunk.right >= end - stop
        if chunk.num_frames and not (has_left and has_right):
            raise InputError(
                f"{self.name}: decoding frames {chunk.start} to {stop - 1} needs frames {first} to "
                f"{end - 1}, but the chunk has {chunk.left} frames of left and {chunk.right} of right "
                "context: use AudioCodec.chunk"
            )
        if frames.dim() != 2 or frames.shape[1] != self.codes_per_frame or frames.dtype != torch.int64:
            raise InputError(
                f"{self.name}: frames must be int64 of shape [F, {self.codes_per_frame}], were "
                f"{frames.dtype} of shape {list(frames.shape)}: reshape the speech tokens to frames"
            )
        if len(frames) and not 0 <= int(frames.min()) <= int(frames.max()) < self.codebook_size:
            raise InputError(
                f"{self.name}: codes must be from 0 to {self.codebook_size - 1}, were from "
                f"{int(frames.min())} to {int(frames.max())}: subtract the offsets of the speech token ids"
            )

    def ready_frames(self, num_frames: int, *, ended: bool) -> int:
        """Return how many frames of a stream can be decoded when its first ``num_frames`` are known.

        Args:
            num_frames: number of frames so far.
            ended: whether the stream has ended.
        """
        return num_frames if ended else max(num_frames - self.right_context, 0)

    def context_at(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of frames on which the samples of frames ``start`` to ``stop - 1`` depend.

        The result is ``(first, end)``; frame ``end`` is not part of the range. ``end`` can exceed the length
        of the stream.
        """
        return max(start - self.left_context, 0), stop + self.right_context

    def chunk(self, frames: Tensor, start: int, stop: int, *, ended: bool) -> CodecChunk:
        """Return the chunk of the frames ``start`` to ``stop - 1`` of a stream, with their context.

        Args:
            frames: all frames of the stream so far, ``[F, C]``.
            start: the first frame to decode.
            stop: the index after the last frame to decode; at most `ready_frames`.
            ended: whether the stream has ended.
        """
        first, end = self.context_at(start, stop)
        end = min(end, len(frames))
        return CodecChunk(frames[first:end], start, start - first, end - stop, ended and end == len(frames))

    def split_stream(self, frames: Tensor, chunk_frames: int) -> Iterator[CodecChunk]:
        """Yield the chunks of a complete stream ``[F, C]``, each with at most ``chunk_frames`` frames."""
        for start in range(0, len(frames), chunk_frames):
            yield self.chunk(frames, start, min(start + chunk_frames, len(frames)), ended=True)
