"""Layers of vision encoders: patch embedding, pre-norm blocks, and the encoders of CLIP and SigLIP.

A vision tower is the part of a vision encoder before the pooling and the projection to the decoder. It
processes a ragged batch of images. Each image is one sequence of the batch, and each patch is one row of the
hidden states. In CLIP, each image also has a class row.

Sources: Dosovitskiy et al. 2020 (ViT, arXiv:2010.11929), Radford et al. 2021 (CLIP, arXiv:2103.00020), Zhai
et al. 2023 (SigLIP, arXiv:2303.15343).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.host.heartbeat import beat
from penstock.kernels import Activation, GraphCache, Ops, StepInputs
from penstock.kernels.graph import Step
from penstock.nn.blueprint import activation_named, num_layers
from penstock.nn.config_values import ConfigValues
from penstock.nn.encoder import EncoderAttention
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader
from penstock.nn.mlp import MLP
from penstock.nn.norm import LayerNorm, RMSNorm
from penstock.nn.rotary import RotaryRows

_QUICK_GELU_FACTOR = 1.702


@dataclass(frozen=True, slots=True)
class EncoderRunner:
    """Runs the steps of a vision encoder.

    A step whose key occurs repeatedly can run as a captured graph; other steps run eagerly. A graph and an
    eager run give bit-equal results.
    """

    ops: Ops
    graphs: GraphCache | None = None

    def __call__(self, key: Hashable, inputs: Mapping[str, Tensor], forward: Step) -> tuple[Tensor, ...]:
        """Return the results of a step.

        Args:
            key: identifies the operations of the step. It contains the id of the encoder and what determines
                the shapes of the inputs, such as the grids or the number of the images.
            inputs: the tensors of the step by name, in the same order for each call with this key.
            forward: computes the results from operations and inputs. It may compute only with these
                operations and with views of tensors.
        """
        results = None if self.graphs is None else self.graphs.run(key, inputs, forward)
        return tuple(forward(self.ops, inputs)) if results is None else results


class RowLayer(Protocol):
    """A layer that computes each row independently."""

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """``x [T, E] -> [T, E']``."""
        ...


@dataclass(frozen=True, slots=True)
class QuickGeluMLP:
    """``down(quick_gelu(up(x)))``, where ``quick_gelu(x) = x * sigmoid(1.702 x)``, as in CLIP."""

    up: Linear
    down: Linear

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        ops = step.ops
        inner = ops.activation(ops.scale(self.up(x, step), _QUICK_GELU_FACTOR), "silu")
        return self.down(ops.scale(inner, 1 / _QUICK_GELU_FACTOR), step)


def load_mlp(
    load: Loader,
    name: str,
    hidden: int,
    inner: int,
    activation: object,
    *,
    up: str = "fc1",
    down: str = "fc2",
) -> MLP | QuickGeluMLP:
    """Return the feed-forward layer called ``name``, with biases.

    Args:
        load: reads and packs the tensors.
        name: the full name of the layer in the checkpoint.
        hidden: E.
        inner: F.
        activation: the name of the activation function in the checkpoint's configuration.
        up: the name of the first matrix.
        down: the name of the second matrix.
    """
    mlp_activation: Activation | None = (
        None if activation == "quick_gelu" else activation_named(activation, "vision_config.hidden_act")
    )
    layers = (
        load.linear(f"{name}.{up}", inner, hidden, bias=True),
        load.linear(f"{name}.{down}", hidden, inner, bias=True),
    )
    return QuickGeluMLP(*layers) if mlp_activation is None else MLP(*layers, mlp_activation)


def load_patch_embedding(load: Loader, name: str, shape: tuple[int, ...], *, bias: bool) -> Linear:
    """Return the patch embedding, stored as a convolution, as a linear layer on flattened patches.

    The stride of the convolution equals its kernel size. The weight is not quantized, because it is small.

    Args:
        load: reads and packs the tensors.
        name: the full name of the convolution in the checkpoint.
        shape: ``(E, C, ...)``, the shape of the convolution's weight.
        bias: whether the convolution has a bias.
    """
    weight = load.source.tensor(f"{name}.weight", shape).flatten(1)
    biases = load.source.tensor(f"{name}.bias", shape[:1]) if bias else None
    return load.pack(weight, {name: shape[0]}, bias=biases, is_unquantized=True)


def flatten_patches(pixels: Tensor, patch_size: int) -> Tensor:
    """Return the patches ``[N h w, C p p]`` of ``pixels [N, C, h p, w p]``, in row-major order."""
    num_images, channels, height, width = pixels.shape
    grid = pixels.reshape(
        num_images, channels, height // patch_size, patch_size, width // patch_size, patch_size
    ).permute(0, 2, 4, 1, 3, 5)
    return grid.reshape(-1, channels * patch_size * patch_size)


def image_step(ops: Ops, row_counts: Sequence[int], device: torch.device) -> StepInputs:
    """Return the inputs of a step for a ragged batch of images, given the number of rows of each image.

    The positions of each image are 0, 1, 2 and so on.
    """
    positions = torch.cat([torch.arange(count) for count in row_counts])
    row_offsets = torch.tensor([0, *row_counts], dtype=torch.int64).cumsum(0).int().to(device)
    return StepInputs(ops, positions.to(device), row_offsets, blocks=ops.sequence_blocks(row_offsets))


def image_step_tensors(step: StepInputs) -> dict[str, Tensor]:
    """Return the tensors of an `image_step` by name, for the inputs of an `EncoderRunner`."""
    return {"positions": step.positions, "row_offsets": step.row_offsets}


def with_step_tensors(step: StepInputs, ops: Ops, tensors: Mapping[str, Tensor]) -> StepInputs:
    """Return a copy of an `image_step` with other operations and other `image_step_tensors`."""
    return replace(step, ops=ops, positions=tensors["positions"], row_offsets=tensors["row_offsets"])


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """A pre-norm block: attention, then the feed-forward layer, each after a norm."""

    attention_norm: LayerNorm | RMSNorm
    attention: EncoderAttention
    mlp_norm: LayerNorm | RMSNorm
    mlp: RowLayer

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepInputs, rows: Sequence[RotaryRows] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the block and the residual, ``[T, E]`` each. Their sum is the hidden state.

        ``x`` and ``residual`` are the results of the previous block. The first block has no residual.
        """
        if residual is None:
            normalized, total = self.attention_norm(x, step), x
        else:
            normalized, total = self.attention_norm.add(x, residual, step)
        normalized, total = self.mlp_norm.add(self.attention(normalized, step, rows), total, step)
        return self.mlp(normalized, step), total


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSizes:
    """Sizes of a CLIP or SigLIP vision tower, read from a checkpoint's ``vision_config``."""

    hidden: int  # E
    inner: int  # F
    layers: int
    heads: int
    channels: int  # C
    image_size: int
    patch_size: int  # p
    norm_eps: float
    activation: object

    @classmethod
    def from_huggingface(cls, config: ConfigValues, *, activation: str, norm_eps: float) -> VisionSizes:
        """Read a ``vision_config`` with the usual key names.

        Args:
            config: the section of the vision tower.
            activation: the family's default activation function.
            norm_eps: the family's default epsilon of norms.

        Raises:
            ConfigError: the heads do not divide the hidden size.
            CheckpointError: a value is missing or invalid.
        """
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        if hidden % heads:
            raise ConfigError(
                "vision_config.num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}"
            )
        return cls(
            hidden=hidden,
            inner=config.integer("intermediate_size"),
            layers=num_layers(config),
            heads=heads,
            channels=config.integer("num_channels", 3),
            image_size=config.integer("image_size"),
            patch_size=config.integer("patch_size"),
            norm_eps=config.number("layer_norm_eps", norm_eps),
            activation=config.get("hidden_act") or activation,
        )

    @property
    def patches_per_side(self) -> int:
        """Number of patches along each side of an image of `image_size`."""
        return self.image_size // self.patch_size


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Patch embedding, learned positions and pre-norm blocks: CLIP and SigLIP."""

    sizes: VisionSizes
    patch_embedding: Linear  # [C p p] -> [E]
    position_table: Tensor  # [P, E]; in CLIP the class embedding is added to the first row
    pre_norm: LayerNorm | None
    blocks: tuple[VisionBlock, ...]
    post_norm: LayerNorm | None

    @classmethod
    def load(
        cls,
        load: Loader,
        name: str,
        sizes: VisionSizes,
        *,
        is_clip: bool = False,
        num_blocks: int | None = None,
        has_post_norm: bool = True,
    ) -> VisionTower:
        """Read a vision tower.

        Args:
            load: reads and packs the tensors.
            name: the prefix of the names of its tensors.
            sizes: sizes and options.
            is_clip: whether the model is CLIP. In CLIP, each image starts with a class row, the patch
                embedding has no bias, and a norm follows the embeddings.
            num_blocks: the number of blocks to load and run; by default all.
            has_post_norm: whether the final norm is loaded and applied.
        """
        hidden, embeddings = sizes.hidden, f"{name}.embeddings"
        shape = (hidden, sizes.channels, sizes.patch_size, sizes.patch_size)
        num_blocks = sizes.layers if num_blocks is None else num_blocks
        positions = load.tensor(
            f"{embeddings}.position_embedding.weight", sizes.patches_per_side**2 + is_clip, hidden
        )
        # The patch embedding maps the zeros of a class row to 0, because it has no bias. The class embedding
        # is therefore added to the position of the class row.
        if is_clip:
            positions = positions.clone()
            positions[0] += load.tensor(f"{embeddings}.class_embedding", hidden)
        return cls(
            sizes,
            load_patch_embedding(load, f"{embeddings}.patch_embedding", shape, bias=not is_clip),
            positions,
            load.layer_norm(f"{name}.pre_layrnorm", hidden, sizes.norm_eps) if is_clip else None,
            tuple(load_vision_block(load, f"{name}.encoder.layers.{i}", sizes) for i in range(num_blocks)),
            load.layer_norm(f"{name}.post_layernorm", hidden, sizes.norm_eps) if has_post_norm else None,
        )

    def __call__(self, patches: Tensor, positions: Tensor, step: StepInputs) -> Tensor:
        """Return the hidden states ``[T, E]`` of images.

        Args:
            patches: ``[T, C p p]``. In CLIP the first row of each image is zero, a placeholder for the class
                row.
            positions: ``[T]`` int64, row indices of the position table.
            step: the inputs of the step, with one sequence for each image.
        """
        ops = step.ops
        x, residual = self._embed(patches, positions, step), None
        for block in self.blocks:
            x, residual = block(x, residual, step)
            beat()
        if residual is None:
            return x if self.post_norm is None else self.post_norm(x, step)
        return ops.add(x, residual) if self.post_norm is None else self.post_norm.add(x, residual, step)[0]

    def hidden_states(
        self, patches: Tensor, positions: Tensor, step: StepInputs, block_counts: Sequence[int]
    ) -> list[Tensor]:
        """Return the hidden states ``[T, E]`` after n blocks, for each number n in ``block_counts``.

        n = 0 means the embeddings. The final norm is not applied. See `__call__` for the other arguments.
        """
        x, residual = self._embed(patches, positions, step), None
        states = {0: x}
        for num_blocks, block in enumerate(self.blocks, 1):
            x, residual = block(x, residual, step)
            if num_blocks in block_counts:
                states[num_blocks] = step.ops.add(x, residual)
            beat()
        return [states[num_blocks] for num_blocks in block_counts]

    def _embed(self, patches: Tensor, positions: Tensor, step: StepInputs) -> Tensor:  # [T, E]
        ops = step.ops
        x = ops.add(self.patch_embedding(patches, step), ops.embedding(positions, self.position_table))
        return x if self.pre_norm is None else self.pre_norm(x, step)


def load_vision_block(load: Loader, name: str, sizes: VisionSizes) -> VisionBlock:
    """Return the block called ``name`` of a CLIP or SigLIP tower."""
    hidden, dim = sizes.hidden, sizes.hidden // sizes.heads
    attention = EncoderAttention(
        load.fused(
            f"{name}.self_attn", dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden), hidden, bias=True
        ),
        load.linear(f"{name}.self_attn.out_proj", hidden, hidden, bias=True),
        sizes.heads,
        sizes.heads,
        dim,
        dim**-0.5,
    )
    return VisionBlock(
        load.layer_norm(f"{name}.layer_norm1", hidden, sizes.norm_eps),
        attention,
        load.layer_norm(f"{name}.layer_norm2", hidden, sizes.norm_eps),
        load_mlp(load, f"{name}.mlp", hidden, sizes.inner, sizes.activation),
    )
