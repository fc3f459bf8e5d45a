"""Weights in 8, 5 and 4 bits: what the numbers stand for, and the product, to the bit.

All of these encodings multiply integers. A row of activations is quantised when it comes, by its own largest
value, the weights were at load; the products are added exactly, and only then scaled. So how the integers
are added up can change nothing, and a row's bits depend on no other row.

* ``int8``: a scale for each output of the weight and each row of the activations. A few activations of
  trained models are many times as large as the others, whose digits they would take (Dettmers et al. 2022,
  arXiv:2208.07339): they become integers of more than 8 bits, see `quantize_activations`.
* ``int4``, ``int5``: a scale for each 32 inputs of either (groups: Frantar et al. 2022, arXiv:2210.17323). A
  group's scale is searched for, as the largest weight is seldom the best measure of the others. The
  activations are quantised to 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.dtype import DType
from penstock.kernels.panels import GROUP, PANEL, group_bytes

_LEAST = 1e-30  # a largest value below counts as 0, so that 127 / x is finite and x / 127 not subnormal
_MAX_HALF = 65504.0
_DIVISORS = tuple(7 + i / 3 for i in range(7))
"""What is tried in 4 bits as the integer, negated, of a group's largest weight: -7, where -8 stays unused, to
-9, where it is clipped to -8. Weights that lie on such a grid already stay what they are. Each bit more
doubles them."""

MAX_EXTRAS = 15
"""Bytes that a row of activations may take beside one for each input."""
INPUTS_AN_EXTRA = 32
"""Inputs of a row for each of these bytes, where they are fewer."""
_REACHES = (1.5, 2, 3, 4, 6, 8, 12, 16)

_ROWS_AT_A_TIME = 512  # of a weight whose scales are searched for: some megabytes


@dataclass(frozen=True, slots=True)
class Int8Encoding:
    """Weights as 8-bit integers with a float32 scale for each output.

    ``weight`` is int8 ``[out, in]``, ``scales`` float32 ``[out]``: the largest magnitude of a row / 127.
    """

    name: str = "int8"
    compute_dtype: DType = DType.bfloat16
    needs_calibration: bool = False

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return _round_up(out_features, PANEL) * _round_up(in_features, 4) + 4 * out_features

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        """A row's largest weight is its measure, whatever else counts more."""
        integers, scales = quantize(weight)
        return {"weight": integers, "scales": scales}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"].float() * tensors["scales"][:, None]

    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """``sum(x_q * w_q) * (scale_x * scale_w) + bias``, rounded once to the type of x."""
        integers, scales = quantize_activations(x)  # [T, in], [T]
        sums = integers.double() @ tensors["weight"].double().T  # exact: below 2^53
        y = sums.float() * (scales[:, None] * tensors["scales"])
        return (y if bias is None else y + bias.float()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class GroupedEncoding:
    """Weights as integers of few bits with a float16 scale for each 32 inputs of an output.

    ``weight`` is int8 ``[out, in]``, of 4 bits in -8..7, ``scales`` float16 ``[out, ceil(in / 32)]``, of
    either sign: see `_search_scales`.
    """

    bits: int
    compute_dtype: DType = DType.bfloat16
    needs_calibration: bool = True

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def num_bytes(self, out_features: int, in_features: int) -> int:
        groups = _round_up(out_features, PANEL) * _round_up(in_features, GROUP) // GROUP
        return groups * group_bytes(self.bits)

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        in_features = weight.shape[1]
        starts = range(0, weight.shape[0], _ROWS_AT_A_TIME)
        if importance is None:
            importance = torch.ones(in_features, device=weight.device)
        weighed = _groups(importance.float()[None])  # [1, G, 32]
        parts = [
            _search_scales(_groups(weight[i : i + _ROWS_AT_A_TIME].float()), weighed, self.bits)
            for i in starts
        ]
        integers = torch.cat([part for part, _ in parts])  # [out, G, 32]
        scales = torch.cat([part for _, part in parts])  # [out, G]
        return {"weight": integers.flatten(1)[:, :in_features].contiguous(), "scales": scales}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        weight, scales = tensors["weight"], tensors["scales"]
        return weight.float() * scales.float().repeat_interleave(GROUP, 1)[:, : weight.shape[1]]

    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """The sum over groups, in their order and in float32, of ``sum(x_q * w_q) * scale_x * scale_w``, plus
        the bias, rounded once to the type of x.

        The last product and the addition round once, as a fused multiply-add does.
        """
        rows, scales_of_rows = quantize(_groups(x.float()))  # [T, G, 32], [T, G]
        weights = _groups(tensors["weight"].float())  # [out, G, 32]
        scales = tensors["scales"].double()  # [out, G]
        y = torch.zeros(len(x), len(weights), dtype=torch.float32, device=x.device)
        for group in range(weights.shape[1]):
            sums = rows[:, group].float() @ weights[:, group].T  # exact: below 2^24
            scaled = sums * scales_of_rows[:, group, None]
            y = (scaled.double() * scales[:, group] + y).float()  # the product is exact in float64
        return (y if bias is None else y + bias.float()).to(x.dtype)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers -127..127 and the float32 scale of each row of ``x [..., n]``: its largest magnitude / 127.

    A row with a NaN or an infinity in it has integers 0 and the scale NaN: all that comes of it is NaN.
    """
    x = x.float()
    top = x.abs().amax(-1)
    integers, scales = _scaled(x, top, torch.full_like(top, 127))
    return integers.to(torch.int8), scales


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize`, of rows ``x [T, in]``, but a few integers may lie beyond -127..127, as int32.

    The largest magnitude of a row becomes the largest of `_REACHES` times 127 for which the integers take, in
    bytes of -127..127 that add up to them, no more than `MAX_EXTRAS` beside one each (of short rows: one for
    `INPUTS_AN_EXTRA` inputs).
    """
    x = x.float()
    top = x.abs().amax(-1)
    room = min(MAX_EXTRAS, x.shape[-1] // INPUTS_AN_EXTRA)
    most, fits = torch.full_like(top, 127), _counts(top)
    for reach in _REACHES:
        farther = torch.full_like(top, 127 * reach)
        magnitudes = _scaled(x, top, farther)[0].abs()
        fits = fits & (((magnitudes.long() - 1).clamp_min(0) // 127).sum(-1) <= room)
        most = torch.where(fits, farther, most)
    integers, scales = _scaled(x, top, most)
    return integers.to(torch.int32), scales


def _counts(top: Tensor) -> Tensor:
    """Of which rows, by their largest magnitudes, there is something to scale."""
    return top.isfinite() & (top >= _LEAST)  # of a row with a NaN the largest is NaN


def _scaled(x: Tensor, top: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """``x [..., n]`` with its largest magnitude at ``most [...]``, rounded, and the scales.

    ``most`` is a tensor, as torch divides a number, or by one, by way of a reciprocal.
    """
    counts = _counts(top)
    integers = torch.where(counts[..., None], (x * (most / top)[..., None]).round(), 0)
    return integers, torch.where(counts, top / most, 0).masked_fill(~top.isfinite(), torch.nan)


def _search_scales(groups: Tensor, importance: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integers of so many bits and the float16 scales of groups of weights ``[out, G, 32]``, whose squared
    errors count as much as the inputs' importance h ``[1, G, 32]`` says.

    Of the integers q that each divisor gives weights w, the best scale is ``sum(hwq) / sum(hqq)``, and those
    are chosen that leave the smallest error with it: the largest ``sum(hwq)^2 / sum(hqq)``, the first of
    several.
    A group with a NaN or an infinity in it has the scale NaN and integers 0.
    """
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    place = groups.abs().argmax(-1, keepdim=True)  # the first of the largest
    largest = groups.gather(-1, place)  # [out, G, 1]
    best_scale = torch.full_like(largest, torch.nan)
    best = torch.full_like(largest, -1)
    for number in _DIVISORS:
        divisor = torch.full_like(largest, -number * 2.0 ** (bits - 4))
        x = groups * torch.where(largest.abs() < _LEAST, 0, divisor / largest)
        integers = x.clamp(low, high).round()
        product, square = torch.zeros_like(largest), torch.zeros_like(largest)
        for k in range(GROUP):  # one after the other, as the kernel adds them
            product += (x * importance * integers)[..., k, None]
            square += (integers.square() * importance)[..., k, None]
        in_weights = product / divisor  # the sum of products with the weights, in units of the largest
        fit = torch.where(square == 0, 0, in_weights * in_weights / square)
        scale = torch.where(square == 0, 0, product / square * (largest / divisor))
        is_better = fit > best
        best = torch.where(is_better, fit, best)
        best_scale = torch.where(is_better, scale, best_scale)
    scale = best_scale.clamp(-_MAX_HALF, _MAX_HALF).half().float() + 0  # no -0
    inverse = torch.where(scale == 0, 0, 1 / scale)
    integers = (groups * inverse).clamp(low, high).round().masked_fill(scale.isnan(), 0)
    return integers.to(torch.int8), scale[..., 0].half()


def _groups(x: Tensor) -> Tensor:
    """``[rows, in]`` as ``[rows, G, 32]``, filled up with zeros."""
    return F.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -(-x.shape[1] // GROUP), GROUP)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
