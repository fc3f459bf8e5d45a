"""`SnacCodec`: SNAC checkpoints without attention layers, such as SNAC 24 kHz.

A frame contains one code of the coarsest codebook, and the codes of the finer codebooks for the same time.
The codes are ordered by start time, coarse codes first. With the strides 4, 2 and 1, a frame has seven codes,
which belong to the codebooks 1, 2, 3, 3, 2, 3, 3.

The decoder adds noise, multiplied by outputs of the network. The noise is a function of the position in the
stream (`codecs.snac.noise`). Decoding is therefore deterministic and independent of the division into chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.codecs.codec import AudioCodec, CodecChunk
from penstock.codecs.layers import CodecLoader, RaggedRows
from penstock.codecs.snac.config import SnacConfig
from penstock.codecs.snac.decoder import SnacDecoder, Span, read_decoder
from penstock.codecs.snac.encoder import SnacEncoder, read_encoder
from penstock.codecs.snac.quantizer import Quantizer, read_quantizer
from penstock.codecs.weights import open_weights
from penstock.engine import InferenceSession
from penstock.errors import InputError
from penstock.kernels import Ops

MIN_QUANTIZED_CHANNELS = 128
"""Convolutions of the decoder with fewer output channels than this number stay in float32."""


class SnacCodec(AudioCodec):
    """Decoder, encoder and quantizer of a SNAC checkpoint."""

    name = "snac"
    tolerance = 1e-4
    with_noise = True
    """Whether the decoder adds noise. Without noise, the output sounds duller."""

    def __init__(
        self, config: SnacConfig, ops: Ops, quantizer: Quantizer, decoder: SnacDecoder, encoder: SnacEncoder
    ) -> None:
        self._ops = ops
        self._quantizer, self._decoder, self._encoder = quantizer, decoder, encoder
        self._rows_per_frame = config.strides[0]
        self.sample_rate = self.encoder_sample_rate = config.sample_rate
        self.codes_per_frame = sum(config.strides[0] // stride for stride in config.strides)
        self.samples_per_frame = config.strides[0] * config.hop
        self.codebook_size = config.codebook_size
        self.left_context = self.right_context = -(-decoder.margin // config.strides[0])

    @classmethod
    def load(
        cls, folder: Path, config: Mapping[str, object], session: InferenceSession, encoding: str = "float32"
    ) -> SnacCodec:
        """Read a checkpoint folder.

        Args:
            folder: the checkpoint.
            config: its ``config.json``.
            session: the session whose back end runs the codec.
            encoding: encoding of the decoder's convolutions with one group and at least
                `MIN_QUANTIZED_CHANNELS` output channels. All other layers are float32.

        Raises:
            CheckpointError: ``config.json`` is invalid, or a tensor is missing or misshapen.
            UnsupportedFeatureError: the checkpoint has attention layers.
        """
        sizes, weights = SnacConfig.read(config, folder), open_weights(folder)
        loader = CodecLoader(weights, session.ops, encoding, min_channels=MIN_QUANTIZED_CHANNELS)
        float_loader = CodecLoader(weights, session.ops)
        codec_parts = (
            read_quantizer(float_loader, sizes),
            read_decoder(loader, sizes),
            read_encoder(float_loader, sizes),
        )
        weights.finish()
        return cls(sizes, session.ops, *codec_parts)

    @property
    def can_encode(self) -> bool:
        return True

    @torch.no_grad()
    def decode_chunks(self, chunks: Sequence[CodecChunk]) -> list[Tensor]:
        for chunk in chunks:
            self.check_chunk(chunk)
        nonempty_chunks = [chunk for chunk in chunks if chunk.num_frames]
        samples = iter(self._decode(nonempty_chunks)) if nonempty_chunks else iter(())
        return [next(samples) if chunk.num_frames else torch.zeros(0) for chunk in chunks]

    def _decode(self, chunks: Sequence[CodecChunk]) -> list[Tensor]:
        rows_per_frame = self._rows_per_frame
        frames = torch.cat([chunk.frames for chunk in chunks])
        latents = RaggedRows(
            self._quantizer.latents(frames, self._ops),
            [len(chunk.frames) * rows_per_frame for chunk in chunks],
        )
        spans = [
            Span(chunk.start - chunk.left, chunk.start, chunk.start + chunk.num_frames).scale(rows_per_frame)
            for chunk in chunks
        ]
        return self._decoder(latents, spans, self._ops, with_noise=self.with_noise)

    @torch.no_grad()
    def encode(self, samples: Tensor) -> Tensor:
        if samples.dim() != 1 or samples.dtype != torch.float32:
            raise InputError(
                f"{self.name}: samples must be float32 of shape [S], were {samples.dtype} of shape "
                f"{list(samples.shape)}: mix the channels and convert the samples"
            )
        padded = F.pad(samples, (0, -len(samples) % self.samples_per_frame))
        if not len(padded):
            return torch.zeros(0, self.codes_per_frame, dtype=torch.int64)
        return self._quantizer.frames(self._encoder(padded, self._ops), self._ops)
