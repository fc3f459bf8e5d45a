"""Arithmetic of int8, int4 and int5: how weights and activations are quantized and multiplied.

Both factors of a product are integers. Weights are quantized at load. Each row or group of activations is
quantized when it is used, by its largest magnitude. The products of a row, or of a group of its inputs, are
added exactly and scaled afterwards, so the order of these additions cannot change the result. The sums of
groups are added in a fixed order. The bits of a row therefore do not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.encodings._sizes import GROUP

_MIN_MAGNITUDE = 1e-30
"""A row or group whose largest magnitude x is below this counts as 0. 127 / x is finite above it."""
_MAX_FLOAT16 = 65504.0
_DIVISORS = tuple(7 + i / 3 for i in range(7))
"""Candidates of the scale search for 4 bits. A candidate d scales a group's largest weight to -d.

They range from 7 (the integer -8 is unused) to 9 (the largest weight is clipped to -8). With 5 bits each
candidate is multiplied by 2."""

MAX_EXTRAS = 15
"""Maximum number of extra bytes of a quantized row of activations, beyond one byte per input."""
INPUTS_PER_EXTRA = 32
"""Minimum number of inputs of a row per extra byte. It limits the extra bytes of short rows."""
_TARGET_MULTIPLES = (1.5, 2, 3, 4, 6, 8, 12, 16)
"""The largest magnitude of a row of activations may be scaled to 127 times one of these, instead of 127."""

_ROWS_PER_SEARCH = 512  # rows of a weight per scale search; limits its memory to some megabytes


def multiply_rows(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    """Return ``sum(x_q * w_q) * (scale_x * scale_w) + bias``, rounded once to the type of x."""
    integers, scales = quantize_activations(x)  # [T, in], [T]
    sums = integers.double() @ tensors["weight"].double().T  # exact: below 2^53
    y = sums.float() * (scales[:, None] * tensors["scales"])
    return (y if bias is None else y + bias.float()).to(x.dtype)


def multiply_groups(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    """Return the sum over groups of ``sum(x_q * w_q) * scale_x * scale_w``, plus the bias.

    Groups are added in float32, in their order. The product with scale_w and the addition round once, as a
    fused multiply-add does. The sum plus the bias is rounded once to the type of x.
    """
    x_codes, x_scales = quantize(_as_groups(x.float()))  # [T, G, 32], [T, G]
    weights = _as_groups(tensors["weight"].float())  # [out, G, 32]
    scales = tensors["scales"].double()  # [out, G]
    y = torch.zeros(len(x), len(weights), dtype=torch.float32, device=x.device)
    for group in range(weights.shape[1]):
        sums = x_codes[:, group].float() @ weights[:, group].T  # exact: below 2^24
        scaled = sums * x_scales[:, group, None]
        y = (scaled.double() * scales[:, group] + y).float()  # the product is exact in float64
    return (y if bias is None else y + bias.float()).to(x.dtype)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers in -127..127 and the float32 scale of each row of ``x [..., n]``.

    The scale is the largest magnitude of the row divided by 127. If that magnitude is below `_MIN_MAGNITUDE`,
    the row gets integers 0 and the scale 0. A row with a NaN or an infinity gets integers 0 and the scale
    NaN, so its products are NaN.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    integers, scales = _scale_rows(x, largest, torch.full_like(largest, 127))
    return integers.to(torch.int8), scales


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows ``x [T, in]`` like `quantize`, but as int32 and with some integers beyond -127..127.

    A CPU kernel represents an integer beyond the range by several bytes in -127..127 that add up to it.
    A row may have `MAX_EXTRAS` extra bytes, but at most one per `INPUTS_PER_EXTRA` inputs. The largest
    magnitude of a row is scaled to 127 times one of `_TARGET_MULTIPLES`: the last one before the first that
    needs more extra bytes. If the first of `_TARGET_MULTIPLES` needs more, the largest magnitude is scaled to
    127.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    max_extras = min(MAX_EXTRAS, x.shape[-1] // INPUTS_PER_EXTRA)
    target, fits = torch.full_like(largest, 127), _can_scale(largest)
    for multiple in _TARGET_MULTIPLES:
        candidate = torch.full_like(largest, 127 * multiple)
        magnitudes = _scale_rows(x, largest, candidate)[0].abs()
        fits = fits & (((magnitudes.long() - 1).clamp_min(0) // 127).sum(-1) <= max_extras)
        target = torch.where(fits, candidate, target)
    integers, scales = _scale_rows(x, largest, target)
    return integers.to(torch.int32), scales


def quantize_groups(weight: Tensor, bits: int, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the integers ``[out, in]`` int8 of a weight and the float16 scales of its groups ``[out, G]``.

    Args:
        weight: ``[out, in]``.
        bits: bits of an integer.
        importance: ``[in]``, weights of the squared errors of the inputs. None: equal weights.
    """
    in_features = weight.shape[1]
    if importance is None:
        importance = torch.ones(in_features, device=weight.device)
    factors = _as_groups(importance.float()[None])  # [1, G, 32]
    row_blocks = [
        _search_scales(_as_groups(weight[start : start + _ROWS_PER_SEARCH].float()), factors, bits)
        for start in range(0, weight.shape[0], _ROWS_PER_SEARCH)
    ]
    integers = torch.cat([block_integers for block_integers, _ in row_blocks])  # [out, G, 32]
    scales = torch.cat([block_scales for _, block_scales in row_blocks])  # [out, G]
    return integers.flatten(1)[:, :in_features].contiguous(), scales


def _can_scale(largest: Tensor) -> Tensor:
    """Return which rows can be scaled: their largest magnitude is finite and at least `_MIN_MAGNITUDE`."""
    return largest.isfinite() & (largest >= _MIN_MAGNITUDE)


def _scale_rows(x: Tensor, largest: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers and scales of rows ``x [..., n]``, for the target of each row.

    The target, ``target [...]``, is the integer to which the largest magnitude of a row, ``largest [...]``,
    is scaled. ``target`` is a tensor, because torch computes a quotient with a Python number through a
    reciprocal, which rounds differently.
    """
    is_valid = _can_scale(largest)
    integers = torch.where(is_valid[..., None], (x * (target / largest)[..., None]).round(), 0)
    return integers, torch.where(is_valid, largest / target, 0).masked_fill(~largest.isfinite(), torch.nan)


def _search_scales(groups: Tensor, importance: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the integers and the float16 scales of groups of weights ``[out, G, 32]``.

    The scale that maps the largest weight to the largest integer is rarely the best, so each of `_DIVISORS`
    is tried. For the integers q of weights w, and the importance h ``[1, G, 32]`` of the inputs, the best
    scale is ``sum(hwq) / sum(hqq)``. Of the candidates, the one with the smallest weighted squared error is
    chosen, that is, with the largest ``sum(hwq)^2 / sum(hqq)``; the first one on a tie. A group with a NaN or
    an infinity gets the scale NaN and integers 0.
    """
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    index = groups.abs().argmax(-1, keepdim=True)  # the first index of the maximum
    largest = groups.gather(-1, index)  # [out, G, 1]
    best_scale = torch.full_like(largest, torch.nan)
    best_fit = torch.full_like(largest, -1)
    for base_divisor in _DIVISORS:
        divisor = torch.full_like(largest, -base_divisor * 2.0 ** (bits - 4))
        scaled_groups = groups * torch.where(largest.abs() < _MIN_MAGNITUDE, 0, divisor / largest)
        integers = scaled_groups.clamp(low, high).round()
        scaled_hwq_sum, hqq_sum = torch.zeros_like(largest), torch.zeros_like(largest)
        for column in range(GROUP):  # one after another, in the order of the C++ kernel
            scaled_hwq_sum += (scaled_groups * importance * integers)[..., column, None]
            hqq_sum += (integers.square() * importance)[..., column, None]
        normed_hwq_sum = scaled_hwq_sum / divisor  # sum(hwq), in units of the largest weight
        fit = torch.where(hqq_sum == 0, 0, normed_hwq_sum * normed_hwq_sum / hqq_sum)
        scale = torch.where(hqq_sum == 0, 0, scaled_hwq_sum / hqq_sum * (largest / divisor))
        is_better = fit > best_fit
        best_fit = torch.where(is_better, fit, best_fit)
        best_scale = torch.where(is_better, scale, best_scale)
    scale = best_scale.clamp(-_MAX_FLOAT16, _MAX_FLOAT16).half().float() + 0  # + 0 turns -0 into 0
    inverse = torch.where(scale == 0, 0, 1 / scale)
    integers = (groups * inverse).clamp(low, high).round().masked_fill(scale.isnan(), 0)
    return integers.to(torch.int8), scale[..., 0].half()


def _as_groups(x: Tensor) -> Tensor:
    """Return ``[rows, in]`` as ``[rows, G, 32]``, padded with zeros."""
    return F.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -(-x.shape[1] // GROUP), GROUP)
