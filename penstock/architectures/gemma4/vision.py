"""The vision encoder of Gemma 4: blocks with norms as in the decoder, rotary embeddings for both axes of an
image, average pooling of squares of patches, and a projection."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.architectures.gemma4.media import POSITIONS
from penstock.errors import ConfigError, InputError
from penstock.host.heartbeat import beat
from penstock.kernels import Activation, Ops, StepInputs
from penstock.nn import Linear, Loader, RMSNorm, RotaryRows, activation_named, num_layers
from penstock.nn.grid_vision import axial_base, axial_rotary_rows, order_by_square
from penstock.nn.vision import EncoderRunner, RowLayer, image_step, image_step_tensors, with_step_tensors

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig
    from penstock.pipelines.core import ImageMetadata

_TOWER = "vision_tower"
_PROJECTION = "embed_vision.embedding_projection"

Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ClippedLinear:
    """A linear layer whose inputs and outputs are clamped."""

    linear: Linear
    input_bounds: Bounds
    output_bounds: Bounds

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        y = self.linear(step.ops.clamp(x, *self.input_bounds), step)
        return step.ops.clamp(y, *self.output_bounds)


@dataclass(frozen=True, slots=True)
class Gemma4VisionAttention:
    """Bidirectional attention with norms of queries, keys and values, and unscaled scores.

    The dims of queries and keys are in the order of `_rotary_order`.
    """

    projections: tuple[RowLayer, ...]
    """Queries, keys and values in one layer ``[E] -> [3 H D]``, or three layers ``[E] -> [H D]``."""
    output: RowLayer  # [H D] -> [E]
    heads: int
    head_dim: int
    q_norm: RMSNorm
    k_norm: RMSNorm
    v_norm: RMSNorm

    def __call__(self, x: Tensor, rows: RotaryRows, step: StepInputs) -> Tensor:
        """``x [T, E] -> [T, E]``."""
        parts = [project(x, step).view(len(x), -1, self.head_dim) for project in self.projections]
        if len(parts) == 1:
            parts = [parts[0][:, i * self.heads : (i + 1) * self.heads] for i in range(3)]
        q, k, v = parts
        q, k = step.ops.rotary(self.q_norm(q, step), self.k_norm(k, step), *rows)
        v = self.v_norm(v, step)
        out = step.ops.encoder_attention(q, k, v, step.row_offsets, scale=1.0, blocks=step.blocks)
        return self.output(out.view(len(x), -1), step)


@dataclass(frozen=True, slots=True)
class Gemma4VisionMLP:
    """A gated feed-forward layer: ``down(activation(gate(x)) * up(x))``."""

    gate: RowLayer
    up: RowLayer
    down: RowLayer
    activation: Activation

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """``x [T, E] -> [T, E]``."""
        gate = step.ops.activation(self.gate(x, step), self.activation)
        return self.down(step.ops.multiply(gate, self.up(x, step)), step)


@dataclass(frozen=True, slots=True)
class Gemma4VisionBlock:
    """Attention, then the feed-forward layer, each with a norm before and after it."""

    attention_norms: tuple[RMSNorm, RMSNorm]
    attention: Gemma4VisionAttention
    mlp_norms: tuple[RMSNorm, RMSNorm]
    mlp: Gemma4VisionMLP

    def __call__(self, x: Tensor, rows: RotaryRows, step: StepInputs) -> Tensor:
        """``x [T, E] -> [T, E]``."""
        before, after = self.attention_norms
        attended = after(self.attention(before(x, step), rows, step), step)
        before, after = self.mlp_norms
        normalized, x = before.add(attended, x, step)
        return step.ops.add(after(self.mlp(normalized, step), step), x)


@dataclass(frozen=True, slots=True)
class Gemma4Vision:
    """Patch embedding, learned positions of both axes, blocks, pooling and projection."""

    patch_embedding: Linear  # [3 p p] -> [E]
    position_tables: Tensor  # [2, P, E]: for columns and rows
    blocks: tuple[Gemma4VisionBlock, ...]
    head_dim: int
    rope_theta: float
    pooling: int
    """The side of the square of patches that becomes one embedding."""
    standardization: tuple[Tensor, Tensor] | None
    """``[E]`` each, float32: a bias that is subtracted from pooled rows, and a factor."""
    norm: RMSNorm
    projection: Linear  # [E] -> [D], D: the hidden size of the decoder
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def load(cls, load: Loader, config: HuggingFaceConfig, text_hidden: int) -> Gemma4Vision:
        """Read the encoder of a checkpoint.

        Args:
            load: reads and packs the tensors.
            config: the section ``vision_config``.
            text_hidden: the hidden size of the decoder.

        Raises:
            ConfigError: the numbers of heads and kv heads differ, the encoder has biases, or its rotary
                embedding is not supported.
        """
        hidden, patch_size = config.integer("hidden_size"), config.integer("patch_size")
        heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim")
        if config.integer("num_key_value_heads", heads) != heads:
            raise ConfigError("vision_config.num_key_value_heads", f"must be {heads}, the number of heads")
        if config.flag("attention_bias"):
            raise ConfigError("vision_config.attention_bias", "must be false")
        rope_theta = axial_base(config, head_dim, default=100.0)
        num_positions, eps = config.integer("position_embedding_size"), config.number("rms_norm_eps", 1e-6)
        embedder, pixels = f"{_TOWER}.patch_embedder", 3 * patch_size**2
        weight = load.source.tensor(f"{embedder}.input_proj.weight", (hidden, pixels))
        standardization = None
        if config.flag("standardize"):
            bias, scale = (
                load.source.tensor(f"{_TOWER}.std_{part}", (hidden,)).float().to(load.device)
                for part in ("bias", "scale")
            )
            standardization = bias, scale
        return cls(
            load.pack(weight, {f"{embedder}.input_proj": hidden}, is_unquantized=True),
            load.tensor(f"{embedder}.position_embedding_table", 2, num_positions, hidden),
            tuple(_block(load, config, layer) for layer in range(num_layers(config))),
            head_dim,
            rope_theta,
            config.integer("pooling_kernel_size"),
            standardization,
            RMSNorm(torch.ones(hidden, dtype=load.dtype, device=load.device), eps),
            load.linear(_PROJECTION, text_hidden, hidden),
            load.device,
            load.dtype,
        )

    def __call__(self, images: Sequence[ImageMetadata], run: EncoderRunner) -> list[Tensor]:
        """Return the decoder embeddings ``[T / pooling^2, D]`` of each image with T patches."""
        return [self.encode(image, run) for image in images]

    def encode(self, image: ImageMetadata, run: EncoderRunner) -> Tensor:
        """Return the decoder embeddings ``[T / pooling^2, D]`` of an image with T patches.

        Raises:
            InputError: the image has more patches along a side than the encoder has positions.
        """
        coordinates = torch.from_numpy(image.arguments[POSITIONS])  # [T, 2]: column, row
        columns, rows = (int(axis.max()) + 1 for axis in coordinates.T)
        if max(columns, rows) > self.position_tables.shape[1]:
            raise InputError(
                f"the image has {columns} x {rows} patches, but the encoder has positions for "
                f"{self.position_tables.shape[1]} patches along a side: send an image that is less elongated"
            )
        order = order_by_square(torch.arange(len(coordinates)).view(rows, columns), self.pooling)
        coordinates = coordinates[order]
        # The pixels are in 0..1, the encoder reads -1..1.
        patches = 2 * (torch.from_numpy(image.pixel_values)[order].float() - 0.5)
        cos, sin = axial_rotary_rows(coordinates, self.head_dim, self.rope_theta)
        on_device = coordinates.to(self.device)
        positions = self.position_tables[0][on_device[:, 0]] + self.position_tables[1][on_device[:, 1]]
        step = image_step(run.ops, [len(patches)], self.device)

        def forward(ops: Ops, tensors: Mapping[str, Tensor]) -> Iterable[Tensor]:
            forward_step, rows = with_step_tensors(step, ops, tensors), (tensors["cos"], tensors["sin"])
            x = ops.add(self.patch_embedding(tensors["patches"], forward_step), tensors["learned_positions"])
            for block in self.blocks:
                x = block(x, rows, forward_step)
                beat()
            return [x]

        inputs = {
            "patches": patches.to(self.device, self.dtype),
            "learned_positions": positions,
            "cos": cos.to(self.device),
            "sin": sin.to(self.device),
            **image_step_tensors(step),
        }
        [x] = run((id(self), columns, rows), inputs, forward)
        return self.projection(self.norm(self._pool(x), step), step)

    def _pool(self, x: Tensor) -> Tensor:
        """Return the scaled averages ``[T / pooling^2, E]`` of squares of patches; ``x [T, E]``."""
        pooled = x.view(-1, self.pooling**2, x.shape[1]).float().mean(1) * math.sqrt(x.shape[1])
        if self.standardization is not None:
            bias, scale = self.standardization
            pooled = (pooled - bias) * scale
        return pooled.to(x.dtype)


def _block(load: Loader, config: HuggingFaceConfig, layer: int) -> Gemma4VisionBlock:
    name, hidden = f"{_TOWER}.encoder.layers.{layer}", config.integer("hidden_size")
    inner, eps = config.integer("intermediate_size"), config.number("rms_norm_eps", 1e-6)
    is_clipped = config.flag("use_clipped_linears")

    def norms(before: str, after: str) -> tuple[RMSNorm, RMSNorm]:
        return load.norm(f"{name}.{before}", hidden, eps), load.norm(f"{name}.{after}", hidden, eps)

    def linear(part: str, out_features: int, in_features: int) -> RowLayer:
        layer = load.linear(f"{name}.mlp.{part}.linear", out_features, in_features)
        return _clipped(load, f"{name}.mlp.{part}", layer) if is_clipped else layer

    return Gemma4VisionBlock(
        norms("input_layernorm", "post_attention_layernorm"),
        _attention(load, config, f"{name}.self_attn", is_clipped=is_clipped),
        norms("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        Gemma4VisionMLP(
            linear("gate_proj", inner, hidden),
            linear("up_proj", inner, hidden),
            linear("down_proj", hidden, inner),
            activation_named(
                config.get("hidden_activation") or "gelu_pytorch_tanh", "vision_config.hidden_activation"
            ),
        ),
    )


def _attention(
    load: Loader, config: HuggingFaceConfig, name: str, *, is_clipped: bool
) -> Gemma4VisionAttention:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    dim, eps = config.integer("head_dim"), config.number("rms_norm_eps", 1e-6)
    order = _rotary_order(dim)

    def weight(part: str) -> Tensor:
        rows = load.source.tensor(f"{name}.{part}.linear.weight", (heads * dim, hidden))
        return rows if part == "v_proj" else rows.view(heads, dim, hidden)[:, order].reshape(-1, hidden)

    def norm(part: str) -> RMSNorm:
        return RMSNorm(load.tensor(f"{name}.{part}.weight", dim)[order.to(load.device)], eps)

    parts = ("q_proj", "k_proj", "v_proj")
    sizes = {f"{name}.{part}.linear": heads * dim for part in parts}
    output = load.linear(f"{name}.o_proj.linear", hidden, heads * dim)
    projections: tuple[RowLayer, ...]
    if is_clipped:
        projections = tuple(
            _clipped(load, f"{name}.{part}", load.pack(weight(part), {f"{name}.{part}.linear": heads * dim}))
            for part in parts
        )
    else:
        projections = (load.pack(torch.cat([weight(part) for part in parts]), sizes),)
    return Gemma4VisionAttention(
        projections,
        _clipped(load, f"{name}.o_proj", output) if is_clipped else output,
        heads,
        dim,
        norm("q_norm"),
        norm("k_norm"),
        RMSNorm(torch.ones(dim, dtype=load.dtype, device=load.device), eps),
    )


def _clipped(load: Loader, name: str, linear: Linear) -> ClippedLinear:
    low_input, high_input, low_output, high_output = (
        load.number(f"{name}.{side}_{bound}") for side in ("input", "output") for bound in ("min", "max")
    )
    return ClippedLinear(linear, (low_input, high_input), (low_output, high_output))


def _rotary_order(head_dim: int) -> Tensor:
    """Return the order of a head's dims in which the rotary embedding rotates the pairs (i, i + D / 2).

    In the checkpoint, the first half of the dims encodes the column of a patch and the second half its row.
    Each half has the pairs (i, i + D / 4).
    """
    return torch.arange(head_dim).view(2, 2, head_dim // 4).transpose(0, 1).flatten()
