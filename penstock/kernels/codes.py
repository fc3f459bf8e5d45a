"""Arithmetic and panel layouts of integer codes with zero points and of 8-bit floats (E4M3).

In shapes, T is the number of rows of activations, P the number of panels and G the number of groups. The
layouts of a weight with N outputs and K inputs are little-endian and contiguous. N and K are rounded up to
whole panels and groups, and padded with zeros:

* `CodePanels` of 4 bits: ``[N / 64, K / 32, 1216]`` uint8. A group of 32 inputs has 1024 bytes of codes in
  the order of `GroupPanels`, then 64 float16 scales, then 64 zero points (uint8).
* `CodePanels` of 8 bits: ``[N / 64, K / 32, 2240]`` uint8. A group of 32 inputs has the codes ``[8, 64, 4]``,
  then 64 float16 scales, then 64 zero points (uint8).
* `Fp8Panels`: ``[N / 64 * (K / 128 * 8448 + 64)]`` uint8: the codes of all panels, then for each panel a
  table of scales and two strides:

  - The codes ``[N / 64, K / 128, 32, 16, 2, 4, 2]``. A group of 128 inputs has 32 steps of 4 inputs. A step
    has 16 sets of four outputs. A set has inputs 0 and 1 of each of the four outputs, then inputs 2 and 3 of
    each of the four outputs.
  - A table with room for 64 float32 scales per group.
  - Two int32 strides, and 56 bytes of padding. The scale of group g and output n is the entry
    ``g * strides[0] + n * strides[1]`` of the table. The strides are 0 and 1 if all groups of each output
    have the same scale, else 1 and 0 if all outputs of each group have the same scale, else 64 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.dtype import DType
from penstock.kernels.encodings._sizes import (
    FP8_GROUP,
    FP8_STRIDE_BYTES,
    GROUP,
    PANEL,
    code_group_bytes,
    fp8_panel_bytes,
)
from penstock.kernels.linear import multiply_floats
from penstock.kernels.panels import PanelLayout, Tensors
from penstock.kernels.quantized import quantize

LARGEST_FP8 = 448.0
_TOP_EXPONENT = 14
"""Binary exponent, as returned by `torch.frexp`, of the largest float16 scale of each row.

`split_scales` chooses the row scale accordingly. The exponent is near the maximum of float16, 16, so that
small scales of the row keep their precision.
"""


# -- Codes with zero points -----------------------------------------------------------------------------


def split_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 scales ``[out, G]`` as float16 scales and float32 row scales ``[out]``.

    Row scales are powers of two. A float16 scale times its row scale equals the given scale if the given
    scale has at most 11 significant bits, as in float16 and bfloat16, and the float16 scale does not
    underflow.
    """
    largest = scales.float().abs().amax(1)
    exponents = torch.frexp(torch.where(largest.isfinite() & (largest > 0), largest, 1.0)).exponent
    shifts = (exponents - _TOP_EXPONENT).clamp(-126, 127)
    row_scales = torch.ldexp(torch.ones_like(largest), shifts)
    return torch.ldexp(scales.float(), -shifts[:, None]).half(), row_scales


def group_codes(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensors:
    """Return the tensors of `LinearEncoding.pack` for codes, with scales and zero points per 32 inputs.

    Args:
        codes: uint8 ``[out, in]``.
        scales: floats ``[out, G]``, one per ``group_size`` inputs.
        zeros: zero points ``[out, G]``, integers in 0..255.
        group_size: number of inputs that share a scale, a multiple of 32. The last group may be shorter.
    """
    num_groups, repeats = -(-codes.shape[1] // GROUP), group_size // GROUP
    float16_scales, row_scales = split_scales(scales)

    def repeat_per_group(values: Tensor) -> Tensor:
        return values.repeat_interleave(repeats, 1)[:, :num_groups].contiguous()

    return {
        "weight": codes.contiguous(),
        "scales": repeat_per_group(float16_scales),
        "zeros": repeat_per_group(zeros.to(torch.uint8)),
        "row_scales": row_scales,
    }


def quantize_codes(weight: Tensor, bits: int) -> Tensors:
    """Quantize a weight ``[out, in]`` to codes. A group with a NaN or an infinity becomes NaN."""
    max_code = (1 << bits) - 1
    padded = F.pad(weight.float(), (0, -weight.shape[1] % GROUP))
    groups = padded.view(len(weight), -1, GROUP)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    float16_scales, row_scales = split_scales((high - low) / max_code)
    scales = float16_scales.float() * row_scales[:, None]
    is_valid = scales.isfinite() & (scales > 0)
    inverse = torch.where(is_valid, 1 / scales, 0.0)
    middle = torch.full_like(scales, 1 << bits - 1)
    zeros = torch.where(is_valid, (-low * inverse).round().clamp(0, max_code), middle)
    codes = ((groups * inverse[..., None]).nan_to_num().round() + zeros[..., None]).clamp(0, max_code)
    return {
        "weight": codes.to(torch.uint8).flatten(1)[:, : weight.shape[1]].contiguous(),
        "scales": float16_scales,
        "zeros": zeros.to(torch.uint8),
        "row_scales": row_scales,
    }


def unpack_codes(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the dequantized weight ``[out, in]`` float32 of codes with zero points."""
    codes, scales = tensors["weight"], tensors["scales"].float() * tensors["row_scales"][:, None]
    groups = F.pad(codes.float(), (0, -codes.shape[1] % GROUP)).view(*scales.shape, GROUP)
    weight = (groups - tensors["zeros"].float()[..., None]) * scales[..., None]
    return weight.flatten(1)[:, : codes.shape[1]].contiguous()


def multiply_codes(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    """Return the product of activations ``x [T, in]`` with a weight of codes with zero points, plus the bias.

    Each group of 32 activations is quantized to integers ``x_q`` with a scale ``scale_x``. The product is the
    sum over groups of ``(sum(x_q * code) - zero * sum(x_q)) * scale_x * scale_w``, added in float32 in the
    order of the groups, times the row scale. Product plus bias is rounded once to the type of x.
    """
    in_features = x.shape[1]
    padding = (0, -in_features % GROUP)
    x_codes, x_scales = quantize(F.pad(x.float(), padding).view(len(x), -1, GROUP))  # [T, G, 32], [T, G]
    codes = F.pad(tensors["weight"].float(), padding).view(len(tensors["weight"]), -1, GROUP)
    zeros, scales = tensors["zeros"].float(), tensors["scales"].double()
    y = torch.zeros(len(x), len(codes), dtype=torch.float32, device=x.device)
    for group in range(codes.shape[1]):
        integers = x_codes[:, group].float()
        sums = integers @ (codes[:, group] - zeros[:, group, None]).T  # exact: below 2^24
        scaled = sums * x_scales[:, group, None]
        y = (scaled.double() * scales[:, group] + y).float()  # the product is exact in float64
    y = y * tensors["row_scales"]
    return (y if bias is None else y + bias.float()).to(x.dtype)


class CodePanels(PanelLayout):
    """Codes of 4 or 8 bits in groups of 32 inputs. The scales and zero points of a group follow its codes."""

    dtype = DType.uint8

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return (-(-out_features // PANEL), -(-in_features // GROUP), PANEL * code_group_bytes(self._bits))

    def to_panels(self, rows: Mapping[str, Tensor]) -> Tensors:
        codes, extra_rows = rows["weight"], -len(rows["weight"]) % PANEL
        groups = F.pad(codes, (0, -codes.shape[1] % GROUP, 0, extra_rows)).view(
            -1, PANEL, rows["scales"].shape[1], GROUP
        )
        groups_first = groups.transpose(1, 2)  # [P, G, 64, 32]
        steps = groups_first.reshape(*groups_first.shape[:3], 8, 4).transpose(2, 3)  # [P, G, 8, 64, 4]
        if self._bits == 4:
            steps = steps[:, :, 0::2] | steps[:, :, 1::2] << 4
        columns = [
            F.pad(rows[name], (0, 0, 0, extra_rows))
            .view(-1, PANEL, rows[name].shape[1])
            .transpose(1, 2)
            .contiguous()
            for name in ("scales", "zeros")
        ]
        parts = [steps.flatten(2), *(column.view(torch.uint8) for column in columns)]
        return {"panels": torch.cat(parts, dim=2), "scales": rows["row_scales"]}

    def from_panels(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
        code_bytes = PANEL * GROUP * self._bits // 8
        codes, scale_bytes, zeros = torch.split(tensors["panels"], [code_bytes, 2 * PANEL, PANEL], dim=2)
        steps = codes.reshape(*codes.shape[:2], -1, PANEL, 4)
        if self._bits == 4:
            steps = torch.stack([steps & 15, steps >> 4], dim=3).flatten(2, 3)
        weight = steps.transpose(2, 3).flatten(3).transpose(1, 2).flatten(2).flatten(0, 1)
        scales = scale_bytes.contiguous().view(torch.float16).transpose(1, 2).flatten(0, 1)
        return {
            "weight": weight[:out_features, :in_features].contiguous(),
            "scales": scales[:out_features].contiguous(),
            "zeros": zeros.transpose(1, 2).flatten(0, 1)[:out_features].contiguous(),
            "row_scales": tensors["scales"],
        }


# -- 8-bit floats ---------------------------------------------------------------------------------------


def quantize_fp8(weight: Tensor) -> Tensors:
    """Quantize a weight ``[out, in]`` to 8-bit floats.

    A group with a NaN or an infinity becomes NaN. The largest magnitude of the other groups of an output
    becomes 448, unless it is 0.
    """
    padded = F.pad(weight.float(), (0, -weight.shape[1] % FP8_GROUP))
    groups = padded.view(len(weight), -1, FP8_GROUP)
    largest = groups.abs().amax(-1)  # [out, G]
    is_finite = largest.isfinite()
    scales = torch.where(is_finite, largest, 0.0).amax(1, keepdim=True) / LARGEST_FP8
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    numbers = (groups * inverse[..., None]).clamp(-LARGEST_FP8, LARGEST_FP8).flatten(1)[:, : weight.shape[1]]
    codes = numbers.nan_to_num().to(torch.float8_e4m3fn).contiguous().view(torch.uint8)
    return {"weight": codes, "scales": torch.where(is_finite, scales, torch.nan)}


def unpack_fp8(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the weight ``[out, in]`` float32 that 8-bit floats and their scales represent."""
    numbers = tensors["weight"].view(torch.float8_e4m3fn).float()
    return numbers * tensors["scales"].repeat_interleave(FP8_GROUP, 1)[:, : numbers.shape[1]]


def multiply_fp8(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    """Return the product of activations ``x [T, in]`` with a weight of 8-bit floats, plus the bias.

    The product is the sum over groups of ``sum(x * w) * scale``. Product plus bias is computed in float32 and
    rounded once to the type of x.
    """
    numbers = tensors["weight"].view(torch.float8_e4m3fn)
    y = torch.zeros(len(x), len(numbers), dtype=torch.float32, device=x.device)
    for group, start in enumerate(range(0, x.shape[1], FP8_GROUP)):
        stop = start + FP8_GROUP
        sums = multiply_floats(x[:, start:stop].float(), numbers[:, start:stop].float(), None)
        y += sums * tensors["scales"][:, group]
    return (y if bias is None else y + bias.float()).to(x.dtype)


class Fp8Panels(PanelLayout):
    """The codes of 8-bit floats of all panels, then the tables of scales of all panels."""

    dtype = DType.uint8

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        num_groups = -(-in_features // FP8_GROUP)
        return (-(-out_features // PANEL) * fp8_panel_bytes(num_groups),)

    def to_panels(self, rows: Mapping[str, Tensor]) -> Tensors:
        codes, extra_rows = rows["weight"], -len(rows["weight"]) % PANEL
        padded = F.pad(codes, (0, -codes.shape[1] % FP8_GROUP, 0, extra_rows))
        num_groups = padded.shape[1] // FP8_GROUP
        groups = padded.view(-1, PANEL, num_groups, FP8_GROUP)
        output_quads = padded.view(-1, PANEL // 4, 4, num_groups, FP8_GROUP // 4, 2, 2)
        steps = output_quads.permute(0, 3, 4, 1, 5, 2, 6)  # [P, G, 32, 16, 2, 4, 2]
        has_nan = ((groups & 127) == 127).any(-1)  # [P, 64, G]
        scales = F.pad(rows["scales"], (0, 0, 0, extra_rows)).view(-1, PANEL, rows["scales"].shape[1])
        scales = scales.masked_fill(has_nan, torch.nan).transpose(1, 2).contiguous()  # [P, G, 64]
        outputs_per_panel = [min(PANEL, len(codes) - PANEL * panel) for panel in range(len(scales))]
        tables = [_scale_table(*pair) for pair in zip(scales, outputs_per_panel, strict=True)]
        return {"panels": torch.cat([steps.flatten(), torch.cat(tables)])}

    def from_panels(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
        num_panels, groups = -(-out_features // PANEL), -(-in_features // FP8_GROUP)
        code_bytes, scale_bytes = PANEL * FP8_GROUP * groups, 4 * PANEL * groups
        codes, table_bytes = tensors["panels"].tensor_split([num_panels * code_bytes])
        tables, strides = torch.split(
            table_bytes.view(num_panels, -1), [scale_bytes, FP8_STRIDE_BYTES], dim=1
        )
        steps = codes.reshape(num_panels, groups, -1, PANEL // 4, 2, 4, 2)  # [P, G, 32, 16, 2, 4, 2]
        weight = steps.permute(0, 3, 5, 1, 2, 4, 6).flatten(3).flatten(0, 2)
        stride_pairs = strides.contiguous().view(torch.int32)[:, :2].long()
        group_strides, output_strides = stride_pairs.T[..., None, None]  # [P, 1, 1] each
        outputs = torch.arange(PANEL)[:, None]
        entry_indices = torch.arange(groups) * group_strides + outputs * output_strides  # [P, 64, G]
        scales = tables.contiguous().view(torch.float32).gather(1, entry_indices.flatten(1)).view(-1, groups)
        return {
            "weight": weight[:out_features, :in_features].contiguous(),
            "scales": scales[:out_features].contiguous(),
        }


def _scale_table(scales: Tensor, num_outputs: int) -> Tensor:
    """Return the bytes of the table of scales of a panel, then of the two strides and their padding.

    Args:
        scales: ``[G, 64]`` float32; the columns from ``num_outputs`` on are padding.
        num_outputs: number of outputs of the panel without padding.
    """
    bits, table = scales[:, :num_outputs].view(torch.int32), torch.zeros(scales.numel())
    if (bits == bits[:1]).all():
        strides, entries = (0, 1), scales[0]
    elif (bits == bits[:, :1]).all():
        strides, entries = (1, 0), scales[:, 0]
    else:
        strides, entries = (PANEL, 1), scales.flatten()
    table[: len(entries)] = entries
    padded = F.pad(torch.tensor(strides, dtype=torch.int32).view(torch.uint8), (0, FP8_STRIDE_BYTES - 8))
    return torch.cat([table.view(torch.uint8), padded])
