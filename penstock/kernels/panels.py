"""Panels: weights in the order in which a CPU multiplies them, 64 outputs side by side.

What the C++ kernels read, defined in torch. All forms are little-endian and contiguous, outputs and inputs
filled up with weights of zero:

* ``float32``: ``[N / 64, K, 64]``.
* ``bfloat16``: ``[N / 64, K / 2, 64, 2]``: pairs of inputs, as the dot product instruction takes them.
* ``int8``: ``[N / 64, K / 4, 64, 4]`` uint8, the integer + 128, beside ``scales [N]`` float32.
* ``int4``: ``[N / 64, K / 32, 1152]`` uint8: of a group of 32 inputs 1024 bytes of integers + 8, four steps
  ``[64, 4]`` of 8 inputs, byte j of an output holding input j in its low half and input j + 4 in its high
  one; then the 64 float16 scales of the group.
* ``int5``: ``[N / 64, K / 32, 1408]`` uint8: as ``int4``, of integers + 16 the low four bits; between them
  and the scales the fifth, of an output 32 in a little-endian word: bit 8 j + 2 s of step s for input j,
  the next one for input j + 4 (j < 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

PANEL = 64
"""Outputs of a panel."""

LAYOUTS_VERSION = 3
"""To be raised when what stands above changes, or what numbers a load makes of a weight: they are kept in
files."""

GROUP = 32
"""Inputs of an ``int4`` or ``int5`` group."""

_LOW = PANEL * GROUP // 2  # bytes of the low four bits of a group's integers
_FIFTH = torch.tensor([[8 * j + 2 * step + half for half in (0, 1) for j in range(4)] for step in range(4)])
"""Places of the fifth bits of a group's inputs, ``[4, 8]``."""

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


def group_bytes(bits: int) -> int:
    """Bytes of an output's integers of so many bits in a group, and of their scale."""
    return GROUP * bits // 8 + 2


def _groups_to_panels(rows: Mapping[str, Tensor], bits: int) -> Tensors:
    weight, scales = rows["weight"], rows["scales"]
    missing, offset = -weight.shape[0] % PANEL, 1 << bits - 1
    integers = F.pad(weight.short() + offset, (0, -weight.shape[1] % GROUP, 0, missing), value=offset)
    groups = integers.view(-1, PANEL, scales.shape[1], GROUP).transpose(1, 2)  # [P, G, 64, 32]
    steps = (groups & 15).view(*groups.shape[:3], 4, 2, 4).permute(0, 1, 3, 2, 5, 4)  # [P, G, 4, 64, 4, 2]
    low = (steps[..., 0] | steps[..., 1] << 4).to(torch.uint8).flatten(2)  # [P, G, 1024]
    fifth = ((groups >> 4).long() << _FIFTH.flatten()).sum(-1)  # [P, G, 64]
    words = (fifth[..., None] >> torch.arange(0, 32, 8) & 255).to(torch.uint8).flatten(2)  # [P, G, 256]
    columns = F.pad(scales, (0, 0, 0, missing)).view(-1, PANEL, scales.shape[1]).transpose(1, 2)
    halves = columns.contiguous().view(torch.uint8)  # [P, G, 128]
    return {"panels": torch.cat([low, words, halves] if bits > 4 else [low, halves], dim=2)}


def _groups_from_panels(
    tensors: Mapping[str, Tensor], out_features: int, in_features: int, bits: int
) -> Tensors:
    panels = tensors["panels"]
    low, words, columns = panels[..., :_LOW], panels[..., _LOW : -2 * PANEL], panels[..., -2 * PANEL :]
    pairs = low.reshape(*low.shape[:2], 4, PANEL, 4).short()  # [P, G, 4, 64, 4]
    steps = torch.stack([pairs & 15, pairs >> 4], dim=-1)  # [P, G, 4, 64, 4, 2]
    groups = steps.permute(0, 1, 3, 2, 5, 4).flatten(3)  # [P, G, 64, 32]
    if bits > 4:
        octets = words.reshape(*words.shape[:2], PANEL, 4).long() << torch.arange(0, 32, 8)
        groups = groups | (octets.sum(-1, keepdim=True) >> _FIFTH.flatten() & 1).short() << 4
    integers = (groups - (1 << bits - 1)).to(torch.int8).transpose(1, 2).flatten(2).flatten(0, 1)
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
    "int5": (partial(_groups_to_panels, bits=5), partial(_groups_from_panels, bits=5)),
    "int4": (partial(_groups_to_panels, bits=4), partial(_groups_from_panels, bits=4)),
}
