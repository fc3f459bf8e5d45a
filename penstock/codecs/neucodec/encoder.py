"""The encoder of NeuCodec: converts samples to codes with a semantic and an acoustic encoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.codecs.layers import CodecLoader
from penstock.codecs.neucodec.acoustic import AcousticEncoder, read_acoustic_encoder
from penstock.codecs.neucodec.config import NeuCodecConfig
from penstock.codecs.neucodec.features import mel_rows
from penstock.codecs.neucodec.semantic import SemanticEncoder, read_semantic_encoder
from penstock.kernels import Ops, PackedLinear

_MARGIN = 1e-3
"""Fraction by which the range of a digit exceeds its outer levels, so that the hyperbolic tangent reaches the
outer levels (arXiv:2309.15505).
"""


@dataclass(frozen=True, slots=True)
class NeuCodecEncoder:
    """Converts samples to codes."""

    semantic: SemanticEncoder
    acoustic: AcousticEncoder
    projection: PackedLinear  # of the joined rows of both encoders
    digit_projection: PackedLinear  # the input projection of the quantizer: one value per digit of a code
    levels: Tensor  # [N] int64: number of levels of each digit of a code, the lowest digit first
    hop: int  # number of samples per frame

    def __call__(self, samples: Tensor, ops: Ops) -> Tensor:
        """``samples [S]`` float32 at 16 kHz -> codes ``[S // hop]`` int64."""
        padded = F.pad(samples, (0, self.hop - len(samples) % self.hop))
        features = mel_rows(padded)
        if not len(features):
            return torch.zeros(0, dtype=torch.int64)
        semantic, acoustic = self.semantic(features, ops), self.acoustic(padded, ops)
        num_frames = min(len(semantic), len(acoustic))
        joined_rows = torch.cat([semantic[:num_frames], acoustic[:num_frames]], 1)
        rows = ops.linear(joined_rows, self.projection)
        return self._quantize(ops.linear(rows, self.digit_projection))

    def _quantize(self, x: Tensor) -> Tensor:
        """Round ``x [T, N]`` to the levels of the digits, and return the codes ``[T]``.

        The range is limited twice, because the residual quantizer and its first stage each limited it in
        training.
        """
        digits = self._limit_range(self._limit_range(x)).round().long() + self.levels // 2
        return (digits * torch.cat([torch.ones(1, dtype=torch.int64), self.levels[:-1].cumprod(0)])).sum(1)

    def _limit_range(self, x: Tensor) -> Tensor:
        """Map ``x [T, N]`` by a hyperbolic tangent to the range of the levels of each digit."""
        half_range = (self.levels - 1) * (1 + _MARGIN) / 2
        offset = torch.where(self.levels % 2 == 0, 0.5, 0.0)
        return (x + (offset / half_range).atanh()).tanh() * half_range - offset


def read_encoder(loader: CodecLoader, config: NeuCodecConfig) -> NeuCodecEncoder:
    """Read the two encoders, the projection of their joined rows, and the input projection of the quantizer.

    Raises:
        CheckpointError: a value of ``config.json`` is missing, or a tensor is missing or misshapen.
        UnsupportedFeatureError: the semantic encoder has parts that are not implemented.
    """
    semantic, size = config.semantic(), config.quantization_dim
    width = semantic.hidden_size + config.hidden_size
    return NeuCodecEncoder(
        read_semantic_encoder(loader, semantic),
        read_acoustic_encoder(loader, config.encoder_hidden_size, config.encoder_strides, config.hidden_size),
        loader.linear("fc_encoder", width, size),
        loader.linear("quantizer.project_in", size, len(config.levels)),
        torch.tensor(config.levels),
        config.encoder_hop,
    )
