"""Arithmetic of the block encodings: dequantization, product, quantization (`kernels.encodings._blocks`)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.encodings._block_kind import BlockKind, NumberTable
from penstock.kernels.encodings._sizes import GROUP, SUPERBLOCK
from penstock.kernels.quantized import quantize

Tensors = dict[str, Tensor]

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The E2M1 numbers of the codes 0 to 7. The code ``8 + i`` stands for ``-MAGNITUDES[i]``."""
_LARGEST_FP4, _LARGEST_FP8, _NAN_FP8, _NAN_E8M0 = 6.0, 448.0, 127, 255
_MAX_INTEGER_SCALE = {"u8": 63, "i8": 127}  # largest integer scale or minimum in superblocks, by scale type


def decode_numbers(kind: BlockKind, codes: Tensor) -> Tensor:
    """Return the float32 numbers that codes represent, without scales and minima."""
    if kind.table is not None:
        return torch.tensor(kind.table.numbers, device=codes.device)[codes.int()]
    if not kind.are_floats:
        return codes.float() - kind.offset
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], device=codes.device)
    return values[codes.int()]


def _numbers_and_unit(kind: BlockKind, codes: Tensor) -> tuple[Tensor, float]:
    """Return the numbers that codes represent, divided by a unit, and the unit.

    The unit is 1, or ``1 / NumberTable.steps`` for codes that are indices into a table. Quotients of numbers
    from a table are rounded to integers. All quotients are multiples of 0.5, so sums of their products with
    integers are exact.
    """
    if kind.table is None:
        return decode_numbers(kind, codes), 1.0
    steps = kind.table.steps
    return (decode_numbers(kind, codes) * steps).round(), 1 / steps


def decode_scales(kind: BlockKind, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the scales ``[out, ceil(in / kind.scaled_inputs)]`` float32, without row scales."""
    scales = tensors["scales"]
    if kind.scale_type == "e8m0":
        powers = torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - 127)
        return powers.masked_fill(scales == _NAN_E8M0, torch.nan)
    if kind.scale_type == "e4m3":
        return scales.view(torch.float8_e4m3fn).float()
    return _multiply_by_factors(kind, scales, tensors.get("factors"), kind.scaled_inputs)


def decode_minima(kind: BlockKind, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the minima ``[out, ceil(in / 32)]`` float32; None if there are none."""
    if kind.min_type is None:
        return None
    return _multiply_by_factors(kind, tensors["minima"], tensors.get("min_factors"), GROUP)


def _multiply_by_factors(
    kind: BlockKind, numbers: Tensor, factors: Tensor | None, inputs_per_number: int
) -> Tensor:
    """Return scales or minima in float32, multiplied by the factors of their superblocks if there are any.

    A scale or minimum belongs to ``inputs_per_number`` inputs.
    """
    if not kind.has_superblocks or factors is None:
        return numbers.float()
    repeated = factors.float().repeat_interleave(SUPERBLOCK // inputs_per_number, 1)
    return numbers.float() * repeated[:, : numbers.shape[1]]


def unpack_blocks(kind: BlockKind, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the dequantized weight ``[out, in]`` float32."""
    weight = decode_numbers(kind, tensors["weight"])
    in_features, scales, minima = weight.shape[1], decode_scales(kind, tensors), decode_minima(kind, tensors)
    if kind.has_row_scales:
        row_scales = tensors["row_scales"][:, None]
        scales, minima = scales * row_scales, None if minima is None else minima * row_scales
    weight = weight * scales.repeat_interleave(kind.scaled_inputs, 1)[:, :in_features]
    return weight if minima is None else weight - minima.repeat_interleave(GROUP, 1)[:, :in_features]


def multiply_blocks(kind: BlockKind, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    """Return the product of activations ``x [T, in]`` with a weight in blocks, plus the bias.

    A group has 32 inputs, or fewer if fewer inputs share a scale. Each group of activations is quantized to
    integers ``x_q`` with a scale ``scale_x``. The product is the sum over groups of ``sum(x_q * number) *
    scale_x * scale - sum(x_q) * scale_x * minimum``, added in float32 in the order of the groups, times the
    row scale if there is one. Product plus bias is rounded once to the type of x. Numbers from a table are
    rounded to multiples of ``1 / NumberTable.steps`` before they are multiplied.
    """
    group_size = min(kind.scaled_inputs, GROUP)
    padding = (0, -x.shape[1] % GROUP)
    groups = F.pad(x.float(), padding).view(len(x), -1, group_size)
    x_codes, x_scales = quantize(groups)  # [T, G, group_size], [T, G]
    numbers, unit = _numbers_and_unit(kind, tensors["weight"])
    numbers = F.pad(numbers, padding).view(len(numbers), -1, group_size)
    scales = decode_scales(kind, tensors).repeat_interleave(kind.scaled_inputs // group_size, 1)[
        :, : numbers.shape[1]
    ]
    minima = decode_minima(kind, tensors)
    # float32 represents multiples of 0.5 below 2^23 exactly. The sums with numbers from a table reach 2^27.
    exact_dtype = torch.float32 if kind.table is None else torch.float64
    y = torch.zeros(len(x), len(numbers), dtype=torch.float32, device=x.device)
    for group in range(scales.shape[1]):
        integers = x_codes[:, group].to(exact_dtype)
        sums = (integers @ numbers[:, group].to(exact_dtype).T).float()
        scaled = sums * (x_scales[:, group, None] * unit)
        y = (scaled.double() * scales[:, group].double() + y).float()
        if minima is not None:
            negated = -integers.sum(1).float() * x_scales[:, group]
            y = (negated.double()[:, None] * minima[:, group].double() + y).float()
    if kind.has_row_scales:
        y = y * tensors["row_scales"]
    return (y if bias is None else y + bias.float()).to(x.dtype)


# -- Quantization ---------------------------------------------------------------------------------------


def quantize_blocks(kind: BlockKind, weight: Tensor) -> Tensors:
    """Quantize a weight ``[out, in]`` to blocks.

    All weights that share a scale or a factor with a NaN or an infinity become NaN.
    """
    in_features, inputs_per_scale = weight.shape[1], kind.scaled_inputs
    groups = F.pad(weight.float(), (0, -in_features % inputs_per_scale)).view(
        len(weight), -1, inputs_per_scale
    )
    if kind.table is not None:
        return _quantize_to_table(kind.table, groups, in_features)
    tensors = _choose_float_scales(kind, groups) if kind.are_floats else _choose_integer_scales(kind, groups)
    scales, minima = decode_scales(kind, tensors), decode_minima(kind, tensors)
    if kind.has_row_scales:
        scales = scales * tensors["row_scales"][:, None]
    is_valid = scales.isfinite() & (scales > 0)
    shifted = groups if minima is None else groups + minima[..., None]
    scaled = torch.where(is_valid[..., None], shifted / scales[..., None], 0.0).nan_to_num()
    if kind.are_floats:
        boundaries = [(low + high) / 2 for low, high in pairwise(MAGNITUDES)]
        codes = torch.bucketize(scaled.abs(), torch.tensor(boundaries)) | (scaled < 0).long() << 3
    else:
        codes = (scaled.round() + kind.offset).clamp(0, (1 << kind.bits) - 1).long()
        codes = torch.where(is_valid[..., None], codes, 1 << kind.bits - 1)
    return {"weight": codes.to(torch.uint8).flatten(1)[:, :in_features].contiguous(), **tensors}


def _quantize_to_table(table: NumberTable, groups: Tensor, in_features: int) -> Tensors:
    """Return scales and codes of ``groups [out, G, size]`` for a table of numbers from -1 to 1.

    The scale of a group is the largest magnitude of its weights. A code is the index of the number in the
    table that is nearest to the weight divided by the scale.
    """
    scales = groups.abs().amax(-1)
    scales = scales.masked_fill(~scales.isfinite(), torch.nan)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    ascending = sorted(set(table.numbers))
    first_codes = torch.tensor([table.numbers.index(number) for number in ascending])
    boundaries = torch.tensor([(low + high) / 2 for low, high in pairwise(ascending)])
    indices = torch.bucketize((groups * inverse[..., None]).nan_to_num(), boundaries)
    return {
        "weight": first_codes[indices].to(torch.uint8).flatten(1)[:, :in_features].contiguous(),
        "scales": scales,
    }


def _choose_float_scales(kind: BlockKind, groups: Tensor) -> Tensors:
    """Return the scales of ``groups [out, G, size]`` for E2M1 codes: E8M0, or E4M3 with row scales."""
    absmax = groups.abs().amax(-1)
    finite = absmax.isfinite()
    if kind.scale_type == "e8m0":
        exponents = torch.frexp(torch.where(finite & (absmax > 0), absmax, 1.0)).exponent - 3
        biased_exponents = torch.where(absmax > 0, (exponents + 127).clamp(0, 254), 127)
        return {"scales": biased_exponents.masked_fill(~finite, _NAN_E8M0).to(torch.uint8)}
    row_absmax = torch.where(finite, absmax, 0.0).amax(1)
    row_scales = torch.where(row_absmax > 0, row_absmax / (_LARGEST_FP4 * _LARGEST_FP8), 1.0)
    ratios = (torch.where(finite, absmax, 0.0) / _LARGEST_FP4 / row_scales[:, None]).clamp(max=_LARGEST_FP8)
    scales = ratios.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(~finite, _NAN_FP8)
    return {"scales": scales, "row_scales": row_scales}


def _choose_integer_scales(kind: BlockKind, groups: Tensor) -> Tensors:
    """Return the scales of ``groups [out, G, size]`` for integer codes.

    The result also contains the minima, factors and row scales, if ``kind`` has them.
    """
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    largest_number = (1 << kind.bits) - 1 - kind.offset
    if kind.min_type is None:
        magnitudes = torch.maximum(-low, high)
        return _encode_scales(kind.scale_type, magnitudes / largest_number, "scales", "factors")
    if kind.is_centred:
        spread = (high - low).masked_fill(~groups.isfinite().all(-1), torch.nan)
        float16_scales = (spread / (largest_number + kind.offset)).half()
        row_scales = torch.ones(len(groups), device=groups.device)
        return {
            "scales": float16_scales,
            "minima": (-low - kind.offset * float16_scales).half(),
            "row_scales": row_scales,
        }
    scales = _encode_scales(kind.scale_type, (high - low) / largest_number, "scales", "factors")
    return scales | _encode_scales(kind.min_type, -low, "minima", "min_factors")


def _encode_scales(scale_type: str, numbers: Tensor, name: str, factor_name: str) -> Tensors:
    """Return nonnegative scales or minima ``[out, G]`` as tensors of `LinearEncoding.pack`.

    Args:
        scale_type: ``f16`` for float16; ``u8`` or ``i8`` for integers with float16 factors of superblocks.
        numbers: the scales or minima, float32.
        name: the name of the tensor of scales or minima.
        factor_name: the name of the tensor of factors.
    """
    if scale_type == "f16":
        return {name: torch.where(numbers.isfinite(), numbers, torch.nan).half()}
    groups_per_superblock = SUPERBLOCK // (16 if scale_type == "i8" else GROUP)
    padding = -numbers.shape[1] % groups_per_superblock
    padded = F.pad(numbers, (0, padding)).view(len(numbers), -1, groups_per_superblock)
    factors = (padded.amax(-1) / _MAX_INTEGER_SCALE[scale_type]).half()
    factors = torch.where(padded.isfinite().all(-1), factors, torch.nan)
    inverse = torch.where(factors > 0, 1 / factors.float(), 0.0)
    integers = (padded * inverse[..., None]).nan_to_num().round().clamp(0, _MAX_INTEGER_SCALE[scale_type])
    integers = integers.flatten(1)[:, : numbers.shape[1]]
    return {
        name: integers.to(torch.int8 if scale_type == "i8" else torch.uint8).contiguous(),
        factor_name: factors,
    }
