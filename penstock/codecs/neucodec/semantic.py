"""The semantic encoder of NeuCodec: a W2v-BERT conformer and convolutions (Gulati et al. 2020,
arXiv:2005.08100; Chung et al. 2021, arXiv:2108.06209).

Attention adds a term for the clipped distance of key and query (Shaw et al. 2018, arXiv:1803.02155). The
kernels do not support this term, so attention is computed with torch, one head at a time. Its speed matters
little, because a reference recording is encoded only once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.codecs.layers import CodecLoader, Conv1d, RaggedRows
from penstock.codecs.neucodec.config import SemanticConfig
from penstock.kernels import Ops, PackedLinear

NormWeights = tuple[Tensor, Tensor]
"""The weight and the bias of a layer norm, ``[E]`` each."""


@dataclass(frozen=True, slots=True)
class HalfFeedForward:
    """A norm and a feed-forward layer whose output is multiplied by 0.5."""

    norm: NormWeights
    up: PackedLinear
    down: PackedLinear  # the weights include the factor 0.5

    def __call__(self, x: Tensor, eps: float, ops: Ops) -> Tensor:  # [T, E] -> [T, E]
        hidden_rows = ops.activation(ops.linear(ops.layer_norm(x, *self.norm, eps), self.up), "silu")
        return ops.linear(hidden_rows, self.down)


@dataclass(frozen=True, slots=True)
class RelativeAttention:
    """Attention with an embedding for each distance between key and query."""

    norm: NormWeights
    qkv: PackedLinear
    output: PackedLinear
    distance_embeddings: Tensor  # [left + 1 + right, D]
    heads: int
    max_left: int
    """Maximum distance of a key before its query. Larger distances use the embedding of this distance."""

    def __call__(self, x: Tensor, eps: float, ops: Ops) -> Tensor:  # [T, E] -> [T, E]
        qkv = ops.linear(ops.layer_norm(x, *self.norm, eps), self.qkv)
        q, k, v = qkv.view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)  # [H, T, D]
        positions = torch.arange(len(x))
        max_right = len(self.distance_embeddings) - 1 - self.max_left
        columns = (positions - positions[:, None]).clamp(-self.max_left, max_right) + self.max_left  # [T, T]
        head_outputs = [
            torch.softmax(
                (queries @ keys.T + (queries @ self.distance_embeddings.T).gather(1, columns))
                * queries.shape[1] ** -0.5,
                -1,
            )
            @ values
            for queries, keys, values in zip(q, k, v, strict=True)
        ]
        return ops.linear(torch.cat(head_outputs, 1), self.output)


@dataclass(frozen=True, slots=True)
class ConvolutionModule:
    """A gated pointwise layer, then a causal depthwise convolution, then a pointwise layer."""

    norm: NormWeights
    values_and_gates: PackedLinear  # [E] -> [2 E]
    depthwise: Conv1d
    depthwise_norm: NormWeights
    output: PackedLinear

    def __call__(self, x: Tensor, eps: float, ops: Ops) -> Tensor:  # [T, E] -> [T, E]
        values, gates = ops.linear(ops.layer_norm(x, *self.norm, eps), self.values_and_gates).chunk(2, 1)
        hidden_rows = values * torch.sigmoid(gates)
        padding_rows = hidden_rows.new_zeros(self.depthwise.packed.kernel_size - 1, hidden_rows.shape[1])
        padded_rows = RaggedRows(
            torch.cat([padding_rows, hidden_rows]), [len(padding_rows) + len(hidden_rows)]
        )
        hidden_rows = ops.layer_norm(self.depthwise(padded_rows, ops).rows, *self.depthwise_norm, eps)
        return ops.linear(ops.activation(hidden_rows, "silu"), self.output)


@dataclass(frozen=True, slots=True)
class ConformerLayer:
    """A conformer layer: half feed-forward layer, attention, convolution, half feed-forward layer, norm."""

    first_feed_forward: HalfFeedForward
    attention: RelativeAttention
    convolution: ConvolutionModule
    second_feed_forward: HalfFeedForward
    norm: NormWeights

    def __call__(self, x: Tensor, eps: float, ops: Ops) -> Tensor:  # [T, E] -> [T, E]
        sublayers = (self.first_feed_forward, self.attention, self.convolution, self.second_feed_forward)
        for sublayer in sublayers:
            x = ops.add(x, sublayer(x, eps, ops))
        return ops.layer_norm(x, *self.norm, eps)


@dataclass(frozen=True, slots=True)
class SemanticEncoder:
    """Converts mel features to rows ``[T, E]`` that represent the content of speech."""

    config: SemanticConfig
    norm: NormWeights
    projection: PackedLinear
    layers: tuple[ConformerLayer, ...]
    adapter: tuple[Conv1d, Conv1d, Conv1d, Conv1d]

    def __call__(self, features: Tensor, ops: Ops) -> Tensor:
        """``features [T, N] -> [T, E]``."""
        eps = self.config.norm_eps
        x = ops.linear(ops.layer_norm(features, *self.norm, eps), self.projection)
        for layer in self.layers:
            x = layer(x, eps, ops)
        first_conv, second_conv, third_conv, last_conv = self.adapter
        lengths = [len(x)]
        rows = ops.activation(first_conv(RaggedRows(x, lengths), ops).rows, "relu")
        hidden = ops.activation(second_conv(RaggedRows(rows, lengths), ops).rows, "relu")
        hidden = third_conv(RaggedRows(hidden, lengths), ops).rows
        return last_conv(RaggedRows(ops.add(hidden, rows), lengths), ops).rows


def read_semantic_encoder(loader: CodecLoader, config: SemanticConfig) -> SemanticEncoder:
    """Read the tensors ``semantic_encoder.*`` and ``semantic_adapter.*``."""
    size, name = config.hidden_size, "semantic_encoder.feature_projection"

    def adapter(index: int) -> Conv1d:
        has_bias = index in (2, 3)
        return loader.conv1d(f"semantic_adapter.conv{index}", size, size, 3, padding=1, has_bias=has_bias)

    return SemanticEncoder(
        config,
        loader.norm(f"{name}.layer_norm", config.num_features),
        loader.linear(f"{name}.projection", config.num_features, size),
        tuple(
            _read_layer(loader, f"semantic_encoder.encoder.layers.{i}", config) for i in range(config.layers)
        ),
        (adapter(1), adapter(2), adapter(3), adapter(4)),
    )


def _read_layer(loader: CodecLoader, name: str, config: SemanticConfig) -> ConformerLayer:
    size, intermediate_size, ops = config.hidden_size, config.intermediate_size, loader.ops

    def feed_forward(part: str) -> HalfFeedForward:
        weight = loader.tensor(f"{name}.{part}.output_dense.weight", size, intermediate_size)
        bias = loader.tensor(f"{name}.{part}.output_dense.bias", size)
        return HalfFeedForward(
            loader.norm(f"{name}.{part}_layer_norm", size),
            loader.linear(f"{name}.{part}.intermediate_dense", size, intermediate_size),
            ops.pack_linear(weight / 2, "float32", bias=bias / 2),
        )

    def pointwise(part: str, outputs: int) -> PackedLinear:
        weight = loader.tensor(f"{name}.conv_module.{part}.weight", outputs, size, 1)
        return ops.pack_linear(weight[..., 0], "float32")

    projection_names = [f"{name}.self_attn.linear_{letter}" for letter in "qkv"]
    weights = [loader.tensor(f"{part}.weight", size, size) for part in projection_names]
    num_distances = config.max_left_distance + 1 + config.max_right_distance
    attention = RelativeAttention(
        loader.norm(f"{name}.self_attn_layer_norm", size),
        ops.pack_linear(
            weights,
            "float32",
            bias=torch.cat([loader.tensor(f"{part}.bias", size) for part in projection_names]),
        ),
        loader.linear(f"{name}.self_attn.linear_out", size, size),
        loader.tensor(f"{name}.self_attn.distance_embedding.weight", num_distances, size // config.heads),
        config.heads,
        config.max_left_distance,
    )
    convolution = ConvolutionModule(
        loader.norm(f"{name}.conv_module.layer_norm", size),
        pointwise("pointwise_conv1", 2 * size),
        loader.conv1d(
            f"{name}.conv_module.depthwise_conv", size, size, config.kernel_size, groups=size, has_bias=False
        ),
        loader.norm(f"{name}.conv_module.depthwise_layer_norm", size),
        pointwise("pointwise_conv2", size),
    )
    return ConformerLayer(
        feed_forward("ffn1"),
        attention,
        convolution,
        feed_forward("ffn2"),
        loader.norm(f"{name}.final_layer_norm", size),
    )
