"""`NeuCodec`: decodes codes of one codebook, 50 per second in the published checkpoint.

`NeuCodec.decode` computes what the published model computes: attention and group norms see the whole stream.
A stream that is still growing cannot be decoded this way. `NeuCodec.decode_chunks` therefore decodes windows
at fixed positions (`codecs.neucodec.windows`). Its results do not depend on the sizes of the chunks. They
differ from those of `decode`, even for a whole stream.

The encoder (`codecs.neucodec.encoder`) has several hundred million parameters that decoding does not need.
It is read from the checkpoint for each call of `NeuCodec.encode` and released after it.
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
from penstock.codecs.neucodec.windows import BLOCK, LEFT, RIGHT, FrameBlock, block, block_at
from penstock.codecs.weights import open_weights
from penstock.engine import InferenceSession
from penstock.errors import InputError, UnsupportedFeatureError
from penstock.kernels import Ops

MAX_CACHED_WINDOWS = 128
"""Number of decoded windows to keep, for the next block and for chunks that are shorter than a block."""
_ENCODER_START = "semantic_encoder.feature_projection.projection.weight"
"""A checkpoint with this tensor has an encoder."""
_ENCODER = ("semantic_encoder.*", "semantic_adapter.*", "acoustic_encoder.*", "fc_encoder.*")
_UNUSED = ("quantizer.project_in.*", "*.inv_freq", "*.original_inv_freq", "*.window", "quantizer.quantizer.*")


@dataclass(frozen=True, slots=True)
class _Window:
    """The frames of a chunk that are decoded for one block."""

    block: FrameBlock
    frames: Tensor
    """Codes of the window, ``[n, 1]``."""

    @property
    def key(self) -> tuple[int, bytes]:
        """The key of the window in the cache: everything on which its samples depend."""
        return self.block.index, self.frames.numpy().tobytes()


class NeuCodec(AudioCodec):
    """Decoder of a NeuCodec checkpoint, and its encoder if there is one.

    Args:
        config: sizes.
        ops: the operations.
        decoder: codes to samples.
        open_encoder: reads the encoder; None if the checkpoint has none.
    """

    name = "neucodec"
    codes_per_frame = 1
    tolerance = 1e-5
    left_context = LEFT + BLOCK + BLOCK - 1
    right_context = BLOCK - 1 + RIGHT

    def __init__(
        self,
        config: NeuCodecConfig,
        ops: Ops,
        decoder: NeuCodecDecoder,
        open_encoder: Callable[[], NeuCodecEncoder] | None = None,
    ) -> None:
        self._ops = ops
        self._open_encoder = open_encoder
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
            CheckpointError: ``config.json`` or the weights do not fit.
            ConfigError: the encoding is unknown.
            UnsupportedFeatureError: the decoder has parts that are not implemented.
        """
        sizes, weights = NeuCodecConfig.read(config, folder), open_weights(folder)
        decoder = read_decoder(CodecLoader(weights, session.ops), sizes, encoding)
        has_encoder = _ENCODER_START in weights
        weights.finish(ignore=(*_ENCODER, *_UNUSED))

        def open_encoder() -> NeuCodecEncoder:
            tensors = open_weights(folder)
            encoder = read_encoder(CodecLoader(tensors, session.ops), sizes)
            tensors.finish(ignore=("*",))  # those of the decoder; reports missing ones
            return encoder

        return cls(sizes, session.ops, decoder, open_encoder if has_encoder else None)

    @property
    def can_encode(self) -> bool:
        return self._open_encoder is not None

    def ready_frames(self, num_frames: int, *, ended: bool) -> int:
        if ended or not num_frames:
            return num_frames
        last = block_at(num_frames)
        while last.index and last.window[1] > num_frames:
            last = block(last.index - 1)
        return last.stop if last.window[1] <= num_frames else 0

    def context_at(self, start: int, stop: int) -> tuple[int, int]:
        first = block_at(start)
        before = block(first.index - 1) if first.index else first
        return before.window[0], block_at(max(stop - 1, start)).window[1]

    @torch.no_grad()
    def decode(self, frames: Sequence[Tensor]) -> list[Tensor]:
        for frame in frames:
            self.check_chunk(CodecChunk(frame))
        return self._decode(frames)

    @torch.no_grad()
    def decode_chunks(self, chunks: Sequence[CodecChunk]) -> list[Tensor]:
        for chunk in chunks:
            self.check_chunk(chunk)
        windows = [self._windows(chunk) for chunk in chunks]
        missing = {one.key: one for ones in windows for one in ones if one.key not in self._cache}
        decoded = self._decode([one.frames for one in missing.values()])
        for (key, one), samples in zip(missing.items(), decoded, strict=True):
            before = one.block.start - one.block.window[0]
            self._cache[key] = samples[before * self.samples_per_frame :].clone()
        results = [self._join(chunk, ones) for chunk, ones in zip(chunks, windows, strict=True)]
        while len(self._cache) > MAX_CACHED_WINDOWS:
            self._cache.popitem(last=False)
        return results

    @torch.no_grad()
    def encode(self, samples: Tensor) -> Tensor:
        if self._open_encoder is None:
            raise UnsupportedFeatureError(
                "encoding audio with this NeuCodec checkpoint",
                "it has no encoder: use the whole checkpoint, or give the codes of the reference",
            )
        if samples.dim() != 1 or samples.dtype != torch.float32:
            raise InputError(
                f"{self.name}: samples must be float32 of shape [S], were {samples.dtype} of shape "
                f"{list(samples.shape)}: mix the channels and convert the samples"
            )
        return self._open_encoder()(samples, self._ops)[:, None]

    def _decode(self, frames: Sequence[Tensor]) -> list[Tensor]:
        """Return the samples of sequences of codes, each decoded as a whole."""
        lengths = [len(frame) for frame in frames if len(frame)]
        if not lengths:
            return [torch.zeros(0) for _ in frames]
        samples = iter(self._decoder(RaggedRows(torch.cat(list(frames)), lengths), self._ops))
        return [next(samples) if len(frame) else torch.zeros(0) for frame in frames]

    def _windows(self, chunk: CodecChunk) -> list[_Window]:
        """Return the windows of the block before the chunk, if there is one, and of the chunk's blocks."""
        if not chunk.num_frames:
            return []
        stop, current = chunk.start + chunk.num_frames, block_at(chunk.start)
        found = [self._window(chunk, block(current.index - 1))] if current.index else []
        while current.start < stop:
            found.append(self._window(chunk, current))
            current = block(current.index + 1)
        return found

    def _window(self, chunk: CodecChunk, frame_block: FrameBlock) -> _Window:
        origin, (first, end) = chunk.start - chunk.left, frame_block.window
        return _Window(frame_block, chunk.frames[first - origin : end - origin])

    def _join(self, chunk: CodecChunk, windows: Sequence[_Window]) -> Tensor:
        """Return the samples of a chunk from those of its windows, blended where two windows overlap."""
        hop, stop, parts = self.samples_per_frame, chunk.start + chunk.num_frames, [torch.zeros(0)]
        tail: Tensor | None = None
        for window in windows:
            start, end, samples = window.block.start, window.block.stop, self._cache[window.key]
            self._cache.move_to_end(window.key)
            body = samples[: (end - start) * hop]
            if end > chunk.start:
                if tail is not None:
                    body = _blended(tail, body, RIGHT * hop)
                parts.append(body[max(chunk.start - start, 0) * hop : (stop - start) * hop])
            tail = samples[(end - start) * hop :]
        return torch.cat(parts)


def _blended(before: Tensor, samples: Tensor, overlap: int) -> Tensor:
    """Return the samples of a window, the first ones blended with those of the previous window.

    Args:
        before: the samples of the previous window after its block.
        samples: the samples of the window's block.
        overlap: the number of samples over which the weights go from 0 to 1.
    """
    count = min(len(before), len(samples))
    weights = (torch.arange(count) + 0.5) / overlap
    return torch.cat([torch.lerp(before[:count], samples[:count], weights), samples[count:]])
