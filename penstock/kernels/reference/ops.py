"""The operations in plain torch. The bits of a row do not depend on the other rows of the batch.

The following measures ensure this:

* Torch uses different matrix kernels for few rows and for many rows. Float products of linear layers are
  therefore padded with zero rows to a multiple of `kernels.linear.ROW_TILE` = 16 rows, and the queries of
  `attention` to a multiple of 8. Products of integers are exact and need no padding.
* The order of additions of a sum over keys could depend on the chunks of a prefill. `attention` therefore
  sums keys in whole blocks, and adds the sums of the blocks from left to right.
* Some vectorized functions of torch round the last elements of a row differently from the other elements. The
  operations avoid these functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.activations import XIELU, Activation
from penstock.kernels.codes import LARGEST_FP8
from penstock.kernels.encodings import ENCODINGS, encoding_named
from penstock.kernels.experts import ClampedSwiGLU, PackedExperts, grouped_by_expert
from penstock.kernels.inputs import LayerKV, LoRAInputs, SamplingInputs, SequenceBlocks
from penstock.kernels.lazy_weight import LazyWeight
from penstock.kernels.linear import (
    ROWS,
    LinearSlice,
    PackedLinear,
    make_packed_linear,
    multiply_floats,
    tensors_in_rows,
    weight_shape,
)
from penstock.kernels.ops import Gating, Ops
from penstock.kernels.reference.attention import paged_attention
from penstock.kernels.reference.convolution import ReferenceConvolution
from penstock.kernels.reference.encoder_attention import ragged_attention
from penstock.kernels.reference.recurrent import ReferenceRecurrent
from penstock.kernels.reference.routing import ReferenceRouting
from penstock.kernels.reference.sampling import sample
from penstock.kernels.spans import ImageSpans

MAX_EXPERT_PAIRS = 1024
"""Maximum number of (row, expert) pairs that `experts` computes at once. Limits the memory of activations."""


class ReferenceOps(ReferenceRecurrent, ReferenceConvolution, ReferenceRouting, Ops):
    """All operations in plain torch, for every device."""

    name = "reference"

    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        return F.embedding(tokens, table)  # raises for negative ids, unlike table[tokens]

    def pack_lazily(
        self,
        weight: Sequence[Tensor],
        encoding: str,
        *,
        bias: Tensor | None = None,
        slices: Sequence[LinearSlice] = (),
    ) -> PackedLinear:
        parts = tuple(part.detach() for part in weight)
        if not self._can_defer(encoding, parts):
            return self.pack_linear(weight, encoding, bias=bias, slices=slices)
        shape = weight_shape(parts)
        num_bytes = encoding_named(encoding).num_bytes(*shape)
        tensors = LazyWeight(parts, num_bytes, lambda importance: self._pack(parts, encoding, importance))
        return make_packed_linear(tensors, shape, encoding, bias, slices, self.layout)

    def _can_defer(self, encoding: str, parts: Sequence[Tensor]) -> bool:
        """Return whether `pack_lazily` defers packing.

        This back end defers it for weights on a CPU in an encoding with `needs_calibration`, if the layout is
        `ROWS`.
        """
        is_on_cpu = parts[0].device.type == "cpu"
        return self.layout == ROWS and encoding_named(encoding).needs_calibration and is_on_cpu

    def _pack(
        self, parts: Sequence[Tensor], encoding: str, importance: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """Return the packed tensors of a weight in parts, in the layout of this back end."""
        return encoding_named(encoding).pack(torch.cat(tuple(parts)), importance)

    def linear(self, x: Tensor, packed: PackedLinear, *, lora: LoRAInputs | None = None) -> Tensor:
        encoding, tensors = ENCODINGS[packed.encoding], packed.tensors
        if isinstance(tensors, LazyWeight) and tensors.parts and encoding.needs_calibration:
            y = multiply_floats(x, torch.cat(tuple(tensors.parts)).to(x.dtype), packed.bias)
        else:
            inputs = x if packed.order is None else x[:, packed.order]
            y = encoding.multiply(inputs, tensors_in_rows(packed), packed.bias)
        return y if lora is None else self._add_lora(y, x, packed, lora)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = x.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
        product_dtype = torch.promote_types(x.dtype, weight.dtype)
        return (weight * normed.to(product_dtype)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        if weight.dim() == 1:
            # torch computes each row of this function separately.
            normed = F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps)
            return normed.to(x.dtype)
        return (F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight + bias).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.layer_norm(total, weight, bias, eps), total

    def layer_norm_of_sum(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        return self.layer_norm(x.float() + residual.float(), weight, bias, eps).to(x.dtype)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def clamp(self, x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return (cap * torch.tanh(x.float() / cap)).to(x.dtype)

    def rope_rows(self, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos[positions], sin[positions]

    def rotary(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        rotate = _rotate_adjacent_pairs if is_interleaved else _rotate
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV) -> None:
        block_size = kv.cache.shape[3]
        blocks, slots_in_blocks = kv.slots // block_size, kv.slots % block_size  # [T]
        for is_value, rows in enumerate((k, v)):  # rows: [T, K, D]; is_value: 0 for keys, 1 for values
            if kv.scales is not None:
                max_code = LARGEST_FP8 if kv.cache.dtype == torch.float8_e4m3fn else 127
                if kv.has_fixed_scales:
                    scale = kv.scales[is_value, 0, :, 0]  # [K]
                else:
                    scale = rows.float().abs().amax(-1).clamp_min(1e-12) / max_code  # [T, K]
                    kv.scales[is_value][blocks, :, slots_in_blocks] = scale
                rows = (rows.float() / scale[..., None]).clamp(-max_code, max_code)
                rows = rows.round() if max_code == 127 else rows
            kv.cache[is_value][blocks, :, slots_in_blocks] = rows.to(kv.cache.dtype)

    def attention(
        self,
        q: Tensor,
        kv: LayerKV,
        row_offsets: Tensor,
        lengths: Tensor,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        spans: ImageSpans | None = None,
    ) -> Tensor:
        return paged_attention(
            q,
            kv,
            row_offsets,
            lengths,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
            spans=None if spans is None else spans.bounds,
        )

    def encoder_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row_offsets: Tensor,
        *,
        scale: float,
        window: int | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
        blocks: SequenceBlocks | None = None,
    ) -> Tensor:
        return ragged_attention(
            q, k, v, row_offsets, scale=scale, window=window, is_causal=is_causal, bias=bias
        )

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        gate, up = x.chunk(2, dim=-1)  # [T, F] each
        return _ACTIVATIONS[activation](gate.float()).to(x.dtype) * up

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        return _ACTIVATIONS[activation](x.float()).to(x.dtype)

    def activated_linear(
        self, x: Tensor, packed: PackedLinear, activation: Activation, *, lora: LoRAInputs | None = None
    ) -> Tensor:
        return self.activation(self.linear(x, packed, lora=lora), activation)

    def sequence_means(self, x: Tensor, row_offsets: Tensor) -> Tensor:
        parts = x.float().split_with_sizes(row_offsets.diff().tolist())
        return torch.stack([rows.sum(0) / len(rows) for rows in parts])

    def xielu(self, x: Tensor, parameters: XIELU) -> Tensor:
        wide, p = x.float(), parameters
        negative_term = p.negative_factor * (torch.exp(wide.clamp(max=p.eps)) - 1 - wide)
        nonlinear_term = torch.where(wide > 0, p.positive_factor * wide * wide, negative_term)
        return (p.slope * wide + nonlinear_term).to(x.dtype)

    def clamped_swiglu(self, x: Tensor, gate: ClampedSwiGLU) -> Tensor:
        gates, ups = x.float().chunk(2, dim=-1)  # [T, F] each
        gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
        return (gates / (1 + torch.exp(-gate.alpha * gates)) * (ups + 1)).to(x.dtype)

    def experts(
        self,
        x: Tensor,
        packed: PackedExperts,
        topk_weights: Tensor,
        topk_ids: Tensor,
        gating: Gating,
        *,
        lora: LoRAInputs | None = None,
    ) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        ids = topk_ids - packed.first_id
        for pairs, pair_counts in grouped_by_expert(
            ids, len(packed.down), max_pairs=MAX_EXPERT_PAIRS, skip_other_ids=packed.is_part
        ):
            rows, counts = pairs // topk_ids.shape[1], list(pair_counts.values())
            gate_ups, downs = [packed.gate_up[i] for i in pair_counts], [packed.down[i] for i in pair_counts]
            y = self._multiply_by_experts(gate_ups, self.take_rows(x, rows), rows, counts, lora)
            if isinstance(gating, ClampedSwiGLU):
                y = self.clamped_swiglu(y, gating)
            else:
                y = self.gated_activation(y, gating)
            y = self._multiply_by_experts(downs, y, rows, counts, lora)
            self._add_pairs(total, rows, y.float() * topk_weights.flatten()[pairs, None], counts)
        return total.to(x.dtype)

    def _add_pairs(self, total: Tensor, rows: Tensor, values: Tensor, counts: Sequence[int]) -> None:
        """Add ``values [P, E]`` to the rows ``rows [P]`` of ``total``, in the order of the values.

        The values are sorted by expert. ``counts`` has the number of values of each expert. The rows of the
        values of an expert are distinct.
        """
        total.index_add_(0, rows, values)

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows]

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        return x.index_copy(0, rows, values.to(x.dtype))

    def sample(self, logits: Tensor, sampling: SamplingInputs, bitmask: Tensor | None = None) -> Tensor:
        return sample(logits, sampling, bitmask)

    def _multiply_by_experts(
        self,
        linears: Sequence[PackedLinear],
        x: Tensor,  # [P, in], sorted by expert
        rows: Tensor,  # [P], their indices in the batch
        counts: Sequence[int],
        lora: LoRAInputs | None,
    ) -> Tensor:  # [P, out]
        """Multiply ``counts[0]`` rows by the first layer, the next ``counts[1]`` by the second, and so on."""
        parts = zip(linears, x.split_with_sizes(counts), rows.split_with_sizes(counts), strict=True)
        return torch.cat(
            [
                self.linear(part, layer, lora=_take_row_adapters(lora, layer, part_rows))
                for layer, part, part_rows in parts
            ]
        )

    def _add_lora(self, y: Tensor, x: Tensor, packed: PackedLinear, lora: LoRAInputs) -> Tensor:
        """Add the product of each adapter to the rows of y that use the adapter, for each slice. Return y.

        Other rows do not change. The product is computed in float32, and rounded once after the addition.
        """
        for layer_slice in packed.slices:
            matrices = lora.matrices.get(layer_slice.name)
            if matrices is None:
                continue
            down, up = matrices  # [n, R, in], [n, out, R]
            ranks = lora.ranks.get(layer_slice.name)
            for adapter, rows in lora.groups:
                rank = down.shape[1] if ranks is None else int(ranks[adapter])
                if rank:
                    delta = multiply_floats(x[rows].float(), down[adapter, :rank].float(), None)
                    delta = multiply_floats(delta, up[adapter, :, :rank].float(), None)
                    output = y[rows, layer_slice.start : layer_slice.stop]
                    y[rows, layer_slice.start : layer_slice.stop] = (output.float() + delta).to(y.dtype)
        return y


def _take_row_adapters(lora: LoRAInputs | None, packed: PackedLinear, rows: Tensor) -> LoRAInputs | None:
    """Return the adapters of these rows; None if there are no adapter matrices for this layer."""
    if lora is None or not any(layer_slice.name in lora.matrices for layer_slice in packed.slices):
        return None
    return lora.take(rows)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R / 2) of the first R dimensions. R is ``2 * cos.shape[-1]``."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()  # [T, H, R / 2]
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], dim=-1)


def _rotate_adjacent_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2 i, 2 i + 1) of the first R dimensions. R is ``2 * cos.shape[-1]``."""
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim:2].float(), x[..., 1:rotary_dim:2].float()  # [T, H, R / 2]
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([rotated.to(x.dtype), x[..., rotary_dim:]], dim=-1)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


def _relu2(x: Tensor) -> Tensor:
    return torch.relu(x) ** 2


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(inner))


_ACTIVATIONS = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": torch.relu,
    "relu2": _relu2,
}
