"""Panels: weights in the order in which a CPU multiplies them, 64 outputs side by side.

What the C++ kernels read, defined in torch. All forms are little-endian and contiguous, outputs and inputs
filled up with weights of zero:

* ``float32``: ``[N / 64, K, 64]``.
* ``bfloat16``: ``[N / 64, K / 2, 64, 2]``: pairs of inputs, as the dot product instruction takes them.
* ``int8``: ``[N / 64, K / 4, 64, 4]`` uint8, the integer + 128, beside ``scales [N]`` float32.
* ``int4``: ``[N / 64, K / 32, 1152]`` uint8: of a group of 32 inputs 1024 bytes of integers + 8, four steps
  ``[64, 4]`` of 8 inputs, byte j of an output holding input j in its low half and input j + 4 in its high
  one; then the 64 float16 scales of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

PANEL = 64
"""Outputs of a panel."""

LAYOUTS_VERSION = 2
"""To be raised when what stands above changes, or what numbers a load makes of a weight: they are kept in
files."""

GROUP = 32
"""Inputs of an ``int4`` group."""

_RECORD = PANEL * GROUP // 2  # bytes of a group's integers, before its scales

Tensors = dict[str, Tensor]


def to_panels(encoding: str, rows: Mapping[str, Tensor]) -> Tensors:
    """A weight in panels, from the form that its encoding defines: ``[out, in]``, and scales.

    Raises:
        KeyError: the encoding has no panels.
    """
    return _FORMS[encoding][0](rows)


def from_panels(encoding: str, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
    """What `to_panels` was given, to the bit.

    Raises:
        KeyError: the encoding has no panels.
    """
    return _FORMS[encoding][1](tensors, out_features, in_features)


def has_panels(encoding: str) -> bool:
    """Whether weights of this encoding can lie in panels."""
    return encoding in _FORMS


def _floats_to_panels(rows: Mapping[str, Tensor]) -> Tensors:
    return {"panels": _interleaved(rows["weight"], 1).flatten(2)}


def _floats_from_panels(tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
    panels = tensors["panels"][..., None]
    return {"weight": _as_rows(panels, out_features, in_features)}


def _pairs_to_panels(rows: Mapping[str, Tensor]) -> Tensors:
    return {"panels": _interleaved(rows["weight"], 2)}


def _pairs_from_panels(tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
    return {"weight": _as_rows(tensors["panels"], out_features, in_features)}


def _int8_to_panels(rows: Mapping[str, Tensor]) -> Tensors:
    panels = (_interleaved(rows["weight"], 4).short() + 128).to(torch.uint8)
    return {"panels": panels, "scales": rows["scales"]}


def _int8_from_panels(tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
    weight = (tensors["panels"].short() - 128).to(torch.int8)
    return {"weight": _as_rows(weight, out_features, in_features), "scales": tensors["scales"]}


def _int4_to_panels(rows: Mapping[str, Tensor]) -> Tensors:
    weight, scales = rows["weight"], rows["scales"]
    missing = -weight.shape[0] % PANEL
    integers = F.pad(weight.short() + 8, (0, -weight.shape[1] % GROUP, 0, missing), value=8)
    steps = integers.view(-1, PANEL, scales.shape[1], 4, 2, 4).permute(
        0, 2, 3, 1, 5, 4
    )  # [P, G, 4, 64, 4, 2]
    halves = (steps[..., 0] | steps[..., 1] << 4).to(torch.uint8).flatten(2)  # [P, G, 1024]
    columns = F.pad(scales, (0, 0, 0, missing)).view(-1, PANEL, scales.shape[1]).transpose(1, 2)
    return {"panels": torch.cat([halves, columns.contiguous().view(torch.uint8)], dim=2)}


def _int4_from_panels(tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
    halves, columns = tensors["panels"][..., :_RECORD], tensors["panels"][..., _RECORD:]
    pairs = halves.reshape(*halves.shape[:2], 4, PANEL, 4).short()  # [P, G, 4, 64, 4]
    steps = torch.stack([pairs & 15, pairs >> 4], dim=-1)  # [P, G, 4, 64, 4, 2]
    integers = (steps - 8).to(torch.int8).permute(0, 3, 1, 2, 5, 4).flatten(2).flatten(0, 1)
    scales = columns.contiguous().view(torch.float16).transpose(1, 2).flatten(0, 1)
    return {
        "weight": integers[:out_features, :in_features].contiguous(),
        "scales": scales[:out_features].contiguous(),
    }


def _interleaved(weight: Tensor, terms: int) -> Tensor:
    """``[N, K]`` as ``[N / 64, K / terms, 64, terms]``, filled up with zeros."""
    outputs, inputs = weight.shape
    padded = F.pad(weight, (0, -inputs % terms, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // terms, terms).transpose(1, 2).contiguous()


def _as_rows(panels: Tensor, out_features: int, in_features: int) -> Tensor:
    """``[out, in]`` of what `_interleaved` made of it."""
    rows = panels.transpose(1, 2).flatten(2).flatten(0, 1)
    return rows[:out_features, :in_features].contiguous()


_FORMS: dict[
    str, tuple[Callable[[Mapping[str, Tensor]], Tensors], Callable[[Mapping[str, Tensor], int, int], Tensors]]
] = {
    "float32": (_floats_to_panels, _floats_from_panels),
    "bfloat16": (_pairs_to_panels, _pairs_from_panels),
    "int8": (_int8_to_panels, _int8_from_panels),
    "int4": (_int4_to_panels, _int4_from_panels),
}
