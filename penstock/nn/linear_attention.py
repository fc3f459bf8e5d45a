"""`LinearAttention`: the gated delta rule with a causal convolution (Yang et al. 2024, arXiv:2412.06464)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ConfigError, UnsupportedFeatureError
from penstock.kernels import StepInputs
from penstock.nn.config_values import ConfigValues
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader
from penstock.nn.norm import RMSNorm
from penstock.nn.rotary import RotaryRows


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionSizes:
    """The sizes of a layer with linear attention."""

    key_heads: int
    heads: int
    """The number of value heads H. Value head h uses key head ``h // (H / key_heads)``."""
    key_dim: int
    value_dim: int
    kernel: int
    """The width of the convolution."""

    @classmethod
    def from_huggingface(cls, config: ConfigValues) -> LinearAttentionSizes:
        """Read the sizes from a ``config.json``. Missing keys have the defaults of Qwen3-Next.

        Raises:
            ConfigError: the key heads do not divide the value heads, or the width of the convolution is 1.
        """
        sizes = cls(
            key_heads=config.integer("linear_num_key_heads", 16),
            heads=config.integer("linear_num_value_heads", 32),
            key_dim=config.integer("linear_key_head_dim", 128),
            value_dim=config.integer("linear_value_head_dim", 128),
            kernel=config.integer("linear_conv_kernel_dim", 4),
        )
        if sizes.heads % sizes.key_heads:
            raise ConfigError(
                "linear_num_key_heads", f"{sizes.key_heads} key heads do not divide {sizes.heads} value heads"
            )
        if sizes.kernel < 2:
            raise ConfigError("linear_conv_kernel_dim", f"must be at least 2, was {sizes.kernel}")
        return sizes

    @property
    def keys(self) -> int:
        """The total size of the keys of a token: key heads times key dim."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The total size of the values of a token: value heads times value dim."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """The number of channels C of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Linear attention with the gated delta rule: ``x [T, E] -> [T, E]``.

    A convolution mixes the queries, keys and values of nearby tokens. Each value head then updates its state
    ``[D, F]`` (key dim, value dim) and reads it with the query. The output is normalized and multiplied by
    the SiLU of a gate.
    """

    sizes: LinearAttentionSizes
    projection: Linear  # [E] -> [C + H F]: queries, keys, values, output gates
    gates: Linear  # [E] -> [2 H]: logits of the update rate, inputs of the decay
    convolution: Tensor  # [K, C] float32
    decay: Tensor  # [2, H] float32: rate and bias, see `RecurrentOps.gated_delta_rule`
    norm: RMSNorm  # [F]
    output: Linear  # [H F] -> [E]
    layer: int  # index among the layers with linear attention

    @classmethod
    def load(
        cls,
        load: Loader,
        name: str,
        hidden: int,
        sizes: LinearAttentionSizes,
        eps: float,
        *,
        layer: int,
        is_by_key_head: bool,
    ) -> LinearAttention:
        """Read the layer called ``name``.

        Args:
            load: reads and packs the tensors.
            name: the full name of the layer in the checkpoint.
            hidden: E.
            sizes: the sizes of the layer.
            eps: epsilon of the norm.
            layer: index among the layers with linear attention.
            is_by_key_head: whether the checkpoint stores ``in_proj_qkvz`` and ``in_proj_ba``, whose rows are
                ordered by key head. Otherwise it stores ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b`` and
                ``in_proj_a``.
        """
        heads, channels = sizes.heads, sizes.channels
        if is_by_key_head:
            projection, gates = _load_by_key_head(load, name, hidden, sizes)
        else:
            projection = load.fused(name, {"in_proj_qkv": channels, "in_proj_z": sizes.values}, hidden)
            stored_gates = [
                load.source.tensor(f"{name}.in_proj_{part}.weight", (heads, hidden)) for part in "ba"
            ]
            gates = _pack_gates(load, stored_gates, {f"{name}.in_proj_{part}": heads for part in "ba"})
        stored_convolution = load.source.tensor(f"{name}.conv1d.weight", (channels, 1, sizes.kernel))
        rates = load.source.tensor(f"{name}.A_log", (heads,)).float().exp()
        bias = load.source.tensor(f"{name}.dt_bias", (heads,)).float()
        return cls(
            sizes,
            projection,
            gates,
            stored_convolution[:, 0].float().T.contiguous().to(load.device),
            torch.stack([rates, bias]).to(load.device),
            load.norm(f"{name}.norm", sizes.value_dim, eps),
            load.linear(f"{name}.out_proj", hidden, sizes.values),
            layer,
        )

    def __call__(self, x: Tensor, rows: Sequence[RotaryRows], step: StepInputs) -> Tensor:
        """Return the output ``[T, E]`` for ``x [T, E]``. ``rows`` is not used: there is no RoPE."""
        if step.kv is None or step.kv.states is None:
            raise UnsupportedFeatureError("linear attention", "needs a cache with recurrent states")
        ops, sizes = step.ops, self.sizes
        state, lengths = step.kv.states.layer(self.layer), step.kv.lengths
        projected = self.projection(x, step)
        qkv, output_gates = projected[:, : sizes.channels], projected[:, sizes.channels :]
        qkv = ops.short_convolution(qkv, self.convolution, state, step.row_offsets, lengths)
        gates = self.gates(x, step)
        out = ops.gated_delta_rule(qkv, gates, self.decay, state, step.row_offsets, lengths)
        output_gates = output_gates.view(len(x), sizes.heads, sizes.value_dim)
        out = ops.apply_gate(self.norm(out, step), output_gates, "silu")
        return self.output(out.view(len(x), -1), step)


def _pack_gates(load: Loader, weights: Sequence[Tensor], parts: dict[str, int]) -> Linear:
    """Return the projection of the gates. It is never quantized, because it controls the states."""
    weight = torch.cat([part.to(load.dtype) for part in weights]).to(load.device)
    return load.pack(weight, parts, is_unquantized=True)


def _load_by_key_head(
    load: Loader, name: str, hidden: int, sizes: LinearAttentionSizes
) -> tuple[Linear, Linear]:
    """Read projections with rows ordered by key head: query, key, values, output gates of key head 0, ...

    The layers have no names, so that adapters for them are refused: the rows of an adapter are ordered by key
    head, those of the packed layers are not.
    """
    if load.source.stored_encoding(f"{name}.in_proj_qkvz.weight") is not None:
        raise UnsupportedFeatureError(
            "a quantized in_proj_qkvz", "its rows must be reordered: use a checkpoint with floats"
        )
    key_heads, heads_per_key_head = sizes.key_heads, sizes.heads // sizes.key_heads
    value_width = heads_per_key_head * sizes.value_dim
    widths = [sizes.key_dim, sizes.key_dim, value_width, value_width]
    stored_rows = load.source.tensor(f"{name}.in_proj_qkvz.weight", (key_heads * sum(widths), hidden))
    parts = torch.split(stored_rows.view(key_heads, -1, hidden), widths, 1)
    projection = load.pack(torch.cat([part.reshape(-1, hidden) for part in parts]).to(load.device), {})
    stored_gates = load.source.tensor(f"{name}.in_proj_ba.weight", (2 * sizes.heads, hidden))
    rates, decays = torch.split(stored_gates.view(key_heads, -1, hidden), heads_per_key_head, 1)
    gates = _pack_gates(load, [rates.reshape(-1, hidden), decays.reshape(-1, hidden)], {})
    return projection, gates
