"""The decoder of NeuCodec: converts codes to samples by residual blocks, a transformer and an inverse STFT.

Attention and group norms use all frames of a sequence, in both directions. Attention has no position
embeddings. The published model rotates all queries and keys of a head by the same angle, which does not
change the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.codecs.layers import CodecLoader, Conv1d, RaggedRows
from penstock.codecs.neucodec.config import NeuCodecConfig
from penstock.kernels import Ops, PackedLinear, encoding_named
from penstock.kernels.convolution import inverse_dft_weight

NUM_GROUPS = 32
NORM_EPS = 1e-6
MAX_MAGNITUDE = 100.0  # of the STFT
FRAMES_PER_WINDOW = 4
"""Length of the STFT window, in frames."""


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """A group norm over all frames of a sequence."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: RaggedRows, ops: Ops) -> Tensor:
        return ops.group_norm(x.rows, self.weight, self.bias, NUM_GROUPS, NORM_EPS, x.offsets)


@dataclass(frozen=True, slots=True)
class ResNetBlock:
    """A residual block: twice a group norm, a SiLU and a convolution."""

    norms: tuple[GroupNorm, GroupNorm]
    convs: tuple[Conv1d, Conv1d]

    def __call__(self, x: RaggedRows, ops: Ops) -> RaggedRows:
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(RaggedRows(ops.activation(norm(y, ops), "silu"), y.lengths), ops)
        return RaggedRows(ops.add(x.rows, y.rows), x.lengths)


@dataclass(frozen=True, slots=True)
class TransformerLayer:
    """A transformer layer: RMS norm, bidirectional attention, RMS norm, feed-forward layer."""

    attention_norm: Tensor
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm: Tensor
    up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class NeuCodecDecoder:
    """Converts codes to samples."""

    config: NeuCodecConfig
    digits: Tensor  # [codebook_size, N]: the values of the N digits of each code
    projection: PackedLinear
    embed: Conv1d
    blocks_before: tuple[ResNetBlock, ...]
    layers: tuple[TransformerLayer, ...]
    blocks_after: tuple[ResNetBlock, ...]
    norm: tuple[Tensor, Tensor]
    head: PackedLinear
    inverse_dft: PackedLinear
    squared_window: Tensor  # [window length]: squares of the STFT window
    dtype: torch.dtype
    """The type of the inputs of the transformer's linear layers."""

    def __call__(self, frames: RaggedRows, ops: Ops) -> list[Tensor]:
        """Return the samples of each sequence: codes ``[F, 1] -> [F * hop]`` float32."""
        x = RaggedRows(ops.embedding(frames.rows.flatten(), self.digits), frames.lengths)
        x = self.embed(RaggedRows(ops.linear(x.rows, self.projection), x.lengths), ops)
        for block in self.blocks_before:
            x = block(x, ops)
        x = RaggedRows(self._transform(x, ops), x.lengths)
        for block in self.blocks_after:
            x = block(x, ops)
        rows = ops.linear(ops.layer_norm(x.rows, *self.norm, NORM_EPS), self.head)
        windows = ops.linear(ops.polar(rows, MAX_MAGNITUDE), self.inverse_dft)
        samples = ops.overlap_add(windows, self.squared_window, self.config.hop, x.offsets)
        return list(torch.split(samples, [length * self.config.hop for length in x.lengths]))

    def _transform(self, x: RaggedRows, ops: Ops) -> Tensor:
        sizes, eps, offsets = self.config, self.config.rms_norm_eps, x.offsets
        residual, blocks = x.rows, ops.sequence_blocks(offsets)
        for layer in self.layers:
            normalized = ops.rms_norm(residual, layer.attention_norm, eps).to(self.dtype)
            q, k, v = ops.linear(normalized, layer.qkv).view(len(normalized), 3, sizes.heads, -1).unbind(1)
            attention_output = ops.encoder_attention(
                q, k, v, offsets, scale=sizes.head_dim**-0.5, blocks=blocks
            )
            update = ops.linear(attention_output.view(len(normalized), -1), layer.output)
            normalized, residual = ops.add_rms_norm(update.float(), residual, layer.mlp_norm, eps)
            hidden = ops.activation(ops.linear(normalized.to(self.dtype), layer.up), "silu")
            residual = ops.add(ops.linear(hidden, layer.down).float(), residual)
        return residual


def read_decoder(loader: CodecLoader, config: NeuCodecConfig, encoding: str) -> NeuCodecDecoder:
    """Read the decoder and the output projection of the quantizer.

    Args:
        loader: reads and packs layers.
        config: sizes.
        encoding: encoding of the transformer's linear layers. With int8 it is also the encoding of the
            convolutions in the residual blocks. All other layers are float32, like their activations.
    """
    prefix, size = "acoustic_decoder", config.hidden_size
    window = torch.hann_window(FRAMES_PER_WINDOW * config.hop)
    block_loader = CodecLoader(loader.weights, loader.ops, "int8" if encoding == "int8" else "float32")
    return NeuCodecDecoder(
        config,
        code_digits(config.levels),
        _read_projection(loader, config),
        loader.conv1d(f"{prefix}.embed", size, size, 7, padding=3),
        _read_blocks(block_loader, f"{prefix}.prior_net", size),
        tuple(
            _read_layer(loader, f"{prefix}.layers.{index}", config, encoding)
            for index in range(config.layers)
        ),
        _read_blocks(block_loader, f"{prefix}.post_net", size),
        (loader.tensor(f"{prefix}.norm.weight", size), loader.tensor(f"{prefix}.norm.bias", size)),
        loader.linear(f"{prefix}.head.linear", size, len(window) + 2),
        loader.ops.pack_linear(inverse_dft_weight(window), "float32"),
        window.square(),
        encoding_named(encoding).compute_dtype.to_torch(),
    )


def code_digits(levels: tuple[int, ...]) -> Tensor:
    """Return the values from -1 to 1 of the digits of each code, ``[prod(levels), len(levels)]``.

    A code of finite scalar quantization (arXiv:2309.15505) is a mixed-radix number. Its digit i has
    ``levels[i]`` values; digit 0 is the lowest.
    """
    codes, columns = torch.arange(int(torch.tensor(levels).prod())), []
    for level in levels:
        half_levels = level // 2
        columns.append((codes % level - half_levels).float() / half_levels)
        codes = codes // level
    return torch.stack(columns, 1)


def _read_projection(loader: CodecLoader, config: NeuCodecConfig) -> PackedLinear:
    """Return one linear layer that replaces the two consecutive layers between digits and decoder."""
    inner_size, size = config.quantization_dim, config.hidden_size
    projection = loader.tensor("quantizer.project_out.weight", inner_size, len(config.levels)).double()
    offset = loader.tensor("quantizer.project_out.bias", inner_size).double()
    weight = loader.tensor("acoustic_decoder.fc.weight", size, inner_size).double()
    bias = loader.tensor("acoustic_decoder.fc.bias", size).double()
    return loader.ops.pack_linear(
        (weight @ projection).float(), "float32", bias=(weight @ offset + bias).float()
    )


def _read_blocks(loader: CodecLoader, prefix: str, size: int) -> tuple[ResNetBlock, ...]:
    blocks = []
    for index in range(2):
        name = f"{prefix}.{index}"
        first_norm, second_norm = (
            GroupNorm(
                loader.tensor(f"{name}.norm{number}.weight", size),
                loader.tensor(f"{name}.norm{number}.bias", size),
            )
            for number in (1, 2)
        )
        convs = (
            loader.conv1d(f"{name}.conv1", size, size, 3, padding=1),
            loader.conv1d(f"{name}.conv2", size, size, 3, padding=1),
        )
        blocks.append(ResNetBlock((first_norm, second_norm), convs))
    return tuple(blocks)


def _read_layer(loader: CodecLoader, name: str, config: NeuCodecConfig, encoding: str) -> TransformerLayer:
    size, ops = config.hidden_size, loader.ops
    inner_size = config.heads * config.head_dim
    qkv = [loader.tensor(f"{name}.self_attn.{letter}_proj.weight", inner_size, size) for letter in "qkv"]
    output = loader.tensor(f"{name}.self_attn.o_proj.weight", size, inner_size)
    up = loader.tensor(f"{name}.mlp.fc1.weight", config.intermediate_size, size)
    down = loader.tensor(f"{name}.mlp.fc2.weight", size, config.intermediate_size)
    return TransformerLayer(
        loader.tensor(f"{name}.input_layernorm.weight", size),
        ops.pack_linear(qkv, encoding),
        ops.pack_linear(output, encoding),
        loader.tensor(f"{name}.post_attention_layernorm.weight", size),
        ops.pack_linear(up, encoding),
        ops.pack_linear(down, encoding),
    )
