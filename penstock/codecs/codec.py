"""`AudioCodec`: converts codes to waveforms and back. Each codec is a folder, see `codecs.registry`.

A codec holds weights and no state of a request. A stream is decoded in chunks. A chunk includes the
surrounding frames on which its samples depend, so the joined chunks equal the stream decoded as one chunk.
Whenever a stream has grown or ended:

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
    """Consecutive frames of a stream, with context at both sides. `AudioCodec.chunk` makes one.

    Without context it is a whole stream: ``CodecChunk(frames)``.
    """

    frames: Tensor
    """``[left + n + right, C]`` int64."""
    start: int = 0
    """Index in the stream of the first frame to decode, ``frames[left]``."""
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

    A frame holds ``codes_per_frame`` codes, C. The codes of a frame have the order in which a language model
    generates them; flattened frames are the speech tokens of a context.
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
    """Largest number of frames before a chunk that its samples depend on."""
    right_context: int
    """Largest number of frames after a chunk that its samples depend on; 0 in a causal codec."""
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
        return self.decode_chunks([CodecChunk(frame) for frame in frames])

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
        """Check the context of a chunk, and shape, type and range of its frames.

        Raises:
            InputError: names the expected and the found values.
        """
        frames, stop = chunk.frames, chunk.start + chunk.num_frames
        first, end = self.context_at(chunk.start, stop)
        has_left = chunk.start - first <= chunk.left <= chunk.start
        has_right = chunk.ended or chunk.right >= end - stop
        if chunk.num_frames < 0 or (chunk.num_frames and not (has_left and has_right)):
            raise InputError(
                f"{self.name}: frames {chunk.start} to {stop} need frames {first} to {end} as context, "
                f"{chunk.left} before and {chunk.right} after them were given: use AudioCodec.chunk"
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

    def ready_frames(self, num_frames: int, *, ended: bool) -> int:
        """Return how many frames of a stream can be decoded if its first ``num_frames`` are known.

        Args:
            num_frames: number of frames so far.
            ended: whether there will be no more.
        """
        return num_frames if ended else max(num_frames - self.right_context, 0)

    def context_at(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first frame that the samples of frames ``start`` to ``stop - 1`` depend on, and the end.

        The end may exceed the stream.
        """
        return max(start - self.left_context, 0), stop + self.right_context

    def chunk(self, frames: Tensor, start: int, stop: int, *, ended: bool) -> CodecChunk:
        """Return the frames from ``start`` to ``stop - 1`` of a stream, with their context.

        Args:
            frames: all frames of the stream so far, ``[F, C]``.
            start: the first frame to decode.
            stop: the frame after the last one to decode, at most `ready_frames`.
            ended: whether there will be no more frames.
        """
        first, end = self.context_at(start, stop)
        end = min(end, len(frames))
        return CodecChunk(frames[first:end], start, start - first, end - stop, ended and end == len(frames))

    def cut(self, frames: Tensor, chunk_frames: int) -> Iterator[CodecChunk]:
        """Yield the chunks of a finished stream ``[F, C]``, each of at most ``chunk_frames`` frames."""
        for start in range(0, len(frames), chunk_frames):
            yield self.chunk(frames, start, min(start + chunk_frames, len(frames)), ended=True)
