"""`NeuCodec`: decodes codes of one codebook, 50 codes per second in the published checkpoint.

`NeuCodec.decode` computes the same function as the published model: attention and group norms use the whole
stream. An incomplete stream cannot be decoded in this way. `NeuCodec.decode_chunks` therefore decodes windows
at fixed positions (`codecs.neucodec.windows`). Its results do not depend on the sizes of the chunks. Even for
a whole stream, the results of `decode_chunks` differ from the results of `decode`.

The encoder (`codecs.neucodec.encoder`) has several hundred million parameters that decoding does not need.
Each call of `NeuCodec.encode` reads it from the checkpoint and releases it afterwards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.codecs.codec import AudioCodec, CodecChunk
from penstock.codecs.layers import CodecLoader, RaggedRows
from penstock.codecs.neucodec.config import NeuCodecConfig
from penstock.codecs.neucodec.decoder import NeuCodecDecoder, read_decoder
from penstock.codecs.neucodec.encoder import NeuCodecEncoder, read_encoder
from penstock.codecs.neucodec.windows import (
    BLOCK_FRAMES,
    LEFT_CONTEXT,
    RIGHT_CONTEXT,
    FrameBlock,
    block_at,
    frame_block,
)
from penstock.codecs.weights import open_weights
from penstock.engine import InferenceSession
from penstock.errors import InputError, UnsupportedFeatureError
from penstock.kernels import Ops

MAX_CACHED_WINDOWS = 128
"""Maximum number of cached windows after a call. The next block and later chunks of the same block use a
window again."""
_ENCODER_TENSOR = "semantic_encoder.feature_projection.projection.weight"
"""A checkpoint with this tensor has an encoder."""
_ENCODER_PATTERNS = ("semantic_encoder.*", "semantic_adapter.*", "acoustic_encoder.*", "fc_encoder.*")
_UNUSED_PATTERNS = (
    "quantizer.project_in.*",
    "*.inv_freq",
    "*.original_inv_freq",
    "*.window",
    "quantizer.quantizer.*",
)


@dataclass(frozen=True, slots=True)
class _Window:
    """The frames of a chunk that are decoded to obtain one block."""

    frame_block: FrameBlock
    frames: Tensor
    """Codes of the window, ``[n, 1]``."""

    @property
    def key(self) -> tuple[int, bytes]:
        """The key of the window in the cache. It determines all samples of the window."""
        return self.frame_block.index, self.frames.numpy().tobytes()


class NeuCodec(AudioCodec):
    """The decoder of a NeuCodec checkpoint, and its encoder if it has one.

    Args:
        config: sizes.
        ops: the operations of the back end.
        decoder: converts codes to samples.
        load_encoder: reads the encoder; None if the checkpoint has no encoder.
    """

    name = "neucodec"
    codes_per_frame = 1
    tolerance = 1e-5
    left_context = LEFT_CONTEXT + BLOCK_FRAMES + BLOCK_FRAMES - 1
    right_context = BLOCK_FRAMES - 1 + RIGHT_CONTEXT

    def __init__(
        self,
        config: NeuCodecConfig,
        ops: Ops,
        decoder: NeuCodecDecoder,
        load_encoder: Callable[[], NeuCodecEncoder] | None = None,
    ) -> None:
        self._ops = ops
        self._load_encoder = load_encoder
        self._decoder = decoder
        self._cache: OrderedDict[tuple[int, bytes], Tensor] = OrderedDict()
        self.sample_rate, self.encoder_sample_rate = config.sample_rate, config.encoder_sample_rate
        self.samples_per_frame = config.hop
        self.codebook_size = len(decoder.digits)

    @classmethod
    def load(
        cls, folder: Path, config: Mapping[str, object], session: InferenceSession, encoding: str = "float32"
    ) -> NeuCodec:
        """Read a checkpoint folder.

        Raises:
            CheckpointError: ``config.json`` is invalid, or a tensor is missing or misshapen.
            ConfigError: the encoding is unknown.
            UnsupportedFeatureError: the decoder has parts that are not implemented.
        """
        sizes, weights = NeuCodecConfig.read(config, folder), open_weights(folder)
        decoder = read_decoder(CodecLoader(weights, session.ops), sizes, encoding)
        has_encoder = _ENCODER_TENSOR in weights
        weights.finish(ignore=(*_ENCODER_PATTERNS, *_UNUSED_PATTERNS))

        def load_encoder() -> NeuCodecEncoder:
            tensors = open_weights(folder)
            encoder = read_encoder(CodecLoader(tensors, session.ops), sizes)
            tensors.finish(ignore=("*",))  # reports missing tensors, and ignores the tensors of the decoder
            return encoder

        return cls(sizes, session.ops, decoder, load_encoder if has_encoder else None)

    @property
    def can_encode(self) -> bool:
        return self._load_encoder is not None

    def ready_frames(self, num_frames: int, *, ended: bool) -> int:
        if ended or not num_frames:
            return num_frames
        last = block_at(num_frames)
        while last.index and last.window[1] > num_frames:
            last = frame_block(last.index - 1)
        return last.stop if last.window[1] <= num_frames else 0

    def context_at(self, start: int, stop: int) -> tuple[int, int]:
        first = block_at(start)
        previous = frame_block(first.index - 1) if first.index else first
        return previous.window[0], block_at(max(stop - 1, start)).window[1]

    @torch.no_grad()
    def decode(self, frames: Sequence[Tensor]) -> list[Tensor]:
        for stream in frames:
            self.check_chunk(CodecChunk(stream))
        return self._decode(frames)

    @torch.no_grad()
    def decode_chunks(self, chunks: Sequence[CodecChunk]) -> list[Tensor]:
        for chunk in chunks:
            self.check_chunk(chunk)
        windows = [self._windows(chunk) for chunk in chunks]
        uncached_windows = {
            window.key: window
            for chunk_windows in windows
            for window in chunk_windows
            if window.key not in self._cache
        }
        decoded_samples = self._decode([window.frames for window in uncached_windows.values()])
        for (key, window), samples in zip(uncached_windows.items(), decoded_samples, strict=True):
            num_left_frames = window.frame_block.start - window.frame_block.window[0]
            self._cache[key] = samples[num_left_frames * self.samples_per_frame :].clone()
        results = [self._join(*chunk_and_windows) for chunk_and_windows in zip(chunks, windows, strict=True)]
        while len(self._cache) > MAX_CACHED_WINDOWS:
            self._cache.popitem(last=False)
        return results

    @torch.no_grad()
    def encode(self, samples: Tensor) -> Tensor:
        if self._load_encoder is None:
            raise UnsupportedFeatureError(
                "encoding audio with this NeuCodec checkpoint",
                "it has no encoder: use the complete checkpoint, or pass the codes of the reference audio",
            )
        if samples.dim() != 1 or samples.dtype != torch.float32:
            raise InputError(
                f"{self.name}: samples must be float32 of shape [S], were {samples.dtype} of shape "
                f"{list(samples.shape)}: mix the channels and convert the samples"
            )
        return self._load_encoder()(samples, self._ops)[:, None]

    def _decode(self, frames: Sequence[Tensor]) -> list[Tensor]:
        """Return the samples of each sequence of codes. Each sequence is decoded as a whole."""
        lengths = [len(sequence) for sequence in frames if len(sequence)]
        if not lengths:
            return [torch.zeros(0) for _ in frames]
        samples = iter(self._decoder(RaggedRows(torch.cat(list(frames)), lengths), self._ops))
        return [next(samples) if len(sequence) else torch.zeros(0) for sequence in frames]

    def _windows(self, chunk: CodecChunk) -> list[_Window]:
        """Return the windows of the block before a chunk (if there is one) and of the chunk's blocks."""
        if not chunk.num_frames:
            return []
        stop, current_block = chunk.start + chunk.num_frames, block_at(chunk.start)
        windows = [self._window(chunk, frame_block(current_block.index - 1))] if current_block.index else []
        while current_block.start < stop:
            windows.append(self._window(chunk, current_block))
            current_block = frame_block(current_block.index + 1)
        return windows

    def _window(self, chunk: CodecChunk, frame_block: FrameBlock) -> _Window:
        origin, (first, end) = chunk.start - chunk.left, frame_block.window
        return _Window(frame_block, chunk.frames[first - origin : end - origin])

    def _join(self, chunk: CodecChunk, windows: Sequence[_Window]) -> Tensor:
        """Return the samples of a chunk from its cached windows.

        Overlapping samples of two windows are cross-faded.
        """
        hop, stop, block_samples = self.samples_per_frame, chunk.start + chunk.num_frames, [torch.zeros(0)]
        overlapping_samples: Tensor | None = None
        for window in windows:
            start, end, samples = window.frame_block.start, window.frame_block.stop, self._cache[window.key]
            self._cache.move_to_end(window.key)
            samples_of_block = samples[: (end - start) * hop]
            if end > chunk.start:
                if overlapping_samples is not None:
                    samples_of_block = _cross_fade(overlapping_samples, samples_of_block, RIGHT_CONTEXT * hop)
                block_samples.append(
                    samples_of_block[max(chunk.start - start, 0) * hop : (stop - start) * hop]
                )
            overlapping_samples = samples[(end - start) * hop :]
        return torch.cat(block_samples)


def _cross_fade(previous_samples: Tensor, samples: Tensor, num_overlapping: int) -> Tensor:
    """Return the samples of a block, with a linear cross-fade from the previous window at the start.

    Args:
        previous_samples: the samples that the previous window computed after its own block.
        samples: the samples of the block.
        num_overlapping: the number of samples of the cross-fade.
    """
    count = min(len(previous_samples), len(samples))
    weights = (torch.arange(count) + 0.5) / num_overlapping
    return torch.cat([torch.lerp(previous_samples[:count], samples[:count], weights), samples[count:]])
