"""Panels of the block encodings, little-endian and contiguous, with N outputs and K inputs.

A panel is ``[N / 64, K / unit, bytes]`` uint8. A unit of 32 inputs is one group. A unit of 64 inputs has 2
groups and 64 float32 scales. A unit of 256 inputs has 8 groups, the 64 float16 factors of the scales, and 64
factors of the minima, if any. A group of 32 inputs has, for 64 outputs:

* 1024 bytes: the low four bits of the codes, in the order of `GroupPanels`,
* for codes of 5 bits: the fifth bits in the order of `GroupPanels`,
* for codes of 6 bits: words ``[2, 64]``, of 16 inputs each. Byte j of a word has the two high bits of the
  inputs j, j + 4, j + 8 and j + 12, lowest first,
* the scales ``[32 / group_size, 64]`` and the minima ``[64]``, unless the scales are those of units.

Padding is 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.dtype import DType
from penstock.kernels.encodings._block_kind import SCALE_BYTES, BlockKind
from penstock.kernels.encodings._sizes import GROUP, PANEL
from penstock.kernels.panels import FIFTH_BITS, PanelLayout, Tensors

_TYPES = {"u8": torch.uint8, "i8": torch.int8, "f16": torch.float16, "f32": torch.float32}
_LOW_BYTES = PANEL * GROUP // 2
_HIGH_BITS = torch.tensor(
    [[8 * (k % 4) + 2 * (k // 8 * 2 + k % 8 // 4) for k in range(16)] for _ in range(2)]
)
"""Positions of the two high bits of a group's inputs in their word, ``[2, 16]``."""


class BlockPanels(PanelLayout):
    """Codes in groups of 32 inputs, each group followed by its scales and minima."""

    dtype = DType.uint8

    def __init__(self, kind: BlockKind) -> None:
        self._kind = kind

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        kind = self._kind
        unit_bytes = kind.unit // GROUP * kind.group_bytes + kind.factor_bytes
        return (-(-out_features // PANEL), -(-in_features // kind.unit), PANEL * unit_bytes)

    def to_panels(self, rows: Mapping[str, Tensor]) -> Tensors:
        kind, codes = self._kind, rows["weight"]
        missing, padding = -len(codes) % PANEL, -codes.shape[1] % kind.unit
        padded = F.pad(codes, (0, padding, 0, missing))
        groups = padded.view(-1, PANEL, padded.shape[1] // GROUP, GROUP).transpose(1, 2)  # [P, G, 64, 32]
        steps = (groups & 15).reshape(*groups.shape[:3], 4, 2, 4).permute(0, 1, 3, 2, 5, 4)
        parts = [(steps[..., 0] | steps[..., 1] << 4).flatten(2)]  # [P, G, 1024]
        high = (groups >> 4).long()
        if kind.bits == 5:
            parts.append(_as_bytes((high << FIFTH_BITS.flatten()).sum(-1)))
        if kind.bits == 6:
            words = (high.reshape(*high.shape[:3], 2, 16) << _HIGH_BITS).sum(-1)  # [P, G, 64, 2]
            parts.append(_as_bytes(words.transpose(2, 3).flatten(2)))
        units = padded.shape[1] // kind.unit
        for name, size in (("scales", kind.scaled_inputs), ("minima", GROUP)):
            if name in rows and size <= GROUP:
                parts.append(_columns(rows[name], missing, padded.shape[1] // GROUP, GROUP // size))
        records = torch.cat(parts, dim=2).view(len(groups), units, -1)
        factors = [_columns(rows[one], missing, units, 1) for one in self._unit_names() if one in rows]
        panels = {"panels": torch.cat([records, *factors], dim=2)}
        return panels | ({"scales": rows["row_scales"]} if kind.has_row_scales else {})

    def from_panels(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
        kind, panels = self._kind, tensors["panels"]
        records, *factors = torch.split(panels, self._unit_sizes(), dim=2)
        groups = records.reshape(len(panels), -1, PANEL * kind.group_bytes)  # [P, G, bytes]
        low, high, *own = torch.split(groups, self._group_sizes(), dim=2)
        pairs = low.reshape(*low.shape[:2], 4, PANEL, 4)
        steps = torch.stack([pairs & 15, pairs >> 4], dim=-1)  # [P, G, 4, 64, 4, 2]
        codes = steps.permute(0, 1, 3, 2, 5, 4).flatten(3)  # [P, G, 64, 32]
        if kind.bits == 5:
            words = _words(high)[..., None]  # [P, G, 64, 1]
            codes = codes | ((words >> FIFTH_BITS.flatten() & 1) << 4).to(torch.uint8)
        if kind.bits == 6:
            words = (
                _words(high).view(*high.shape[:2], 2, PANEL).transpose(2, 3)[..., None]
            )  # [P, G, 64, 2, 1]
            codes = codes | ((words >> _HIGH_BITS & 3) << 4).flatten(3).to(torch.uint8)
        weight = codes.transpose(1, 2).flatten(2).flatten(0, 1)
        found = {"weight": weight[:out_features, :in_features].contiguous()}

        def add(name: str, columns: Tensor, stored: str, size: int) -> None:
            numbers = columns.contiguous().view(_TYPES.get(stored, torch.uint8))
            rows = numbers.view(*columns.shape[:2], -1, PANEL).flatten(1, 2).transpose(1, 2).flatten(0, 1)
            found[name] = rows[:out_features, : -(-in_features // size)].contiguous()

        if not kind.has_unit_scales:
            add("scales", own[0], kind.scale_type, kind.scaled_inputs)
        if kind.min_type:
            add("minima", own[1], kind.min_type, GROUP)
        for name, columns in zip(self._unit_names(), factors, strict=False):
            add(name, columns, kind.scale_type if kind.has_unit_scales else "f16", kind.unit)
        return found | ({"row_scales": tensors["scales"]} if kind.has_row_scales else {})

    def _unit_names(self) -> tuple[str, ...]:
        """Return the names of the tensors that may follow the groups of a unit."""
        return ("scales",) if self._kind.has_unit_scales else ("factors", "min_factors")

    def _unit_sizes(self) -> list[int]:
        kind = self._kind
        factors = [SCALE_BYTES[kind.scale_type] * PANEL] if kind.has_unit_scales else []
        factors = factors or [2 * PANEL] * (kind.factor_bytes // 2)
        return [PANEL * kind.unit // GROUP * kind.group_bytes, *factors]

    def _group_sizes(self) -> list[int]:
        kind = self._kind
        high = PANEL * GROUP * (kind.bits - 4) // 8
        scales = PANEL * SCALE_BYTES[kind.scale_type] * (GROUP // kind.scaled_inputs)
        minima = [PANEL * SCALE_BYTES[kind.min_type]] if kind.min_type else []
        return [_LOW_BYTES, high] if kind.has_unit_scales else [_LOW_BYTES, high, scales, *minima]


def _columns(numbers: Tensor, missing: int, units: int, parts: int) -> Tensor:
    """Return numbers ``[out, units * parts]``, or fewer, as bytes ``[P, units, parts * 64 * size]``."""
    padded = F.pad(numbers, (0, units * parts - numbers.shape[1], 0, missing))
    columns = padded.view(-1, PANEL, units, parts).permute(0, 2, 3, 1).contiguous()
    return columns.view(torch.uint8).flatten(2)


def _as_bytes(words: Tensor) -> Tensor:
    """Return 32-bit words ``[P, G, n]``, as int64, as bytes ``[P, G, 4 n]``."""
    return (words[..., None] >> torch.arange(0, 32, 8) & 255).to(torch.uint8).flatten(2)


def _words(octets: Tensor) -> Tensor:
    """Return the 32-bit words of bytes ``[P, G, 4 n]``, as int64 ``[P, G, n]``."""
    return (octets.reshape(*octets.shape[:2], -1, 4).long() << torch.arange(0, 32, 8)).sum(-1)
