"""The panel layout of the block encodings, for a weight with N outputs and K inputs.

The tensor ``panels`` is ``[ceil(N / 64), ceil(K / unit), bytes]`` uint8, little-endian. The last dimension
holds the weights of a unit: 64 outputs and ``unit`` inputs. The encoding determines ``unit``:

* 32 inputs: one group,
* 64 inputs: 2 groups, then 64 float32 scales,
* 256 inputs: 8 groups, then 64 float16 factors that multiply the scales. If the encoding has minima, 64
  float16 factors that multiply the minima follow.

A group has 32 inputs of 64 outputs:

* 1024 bytes: the low four bits of the codes, in the order of `GroupPanels`,
* for codes of 5 bits: the fifth bits, in the order of `GroupPanels`,
* for codes of 6 bits: words ``[2, 64]`` of 32 bits. A word has the two high bits of each of 16 inputs. Byte j
  of a word has the high bits of the inputs j, j + 4, j + 8 and j + 12, from the lowest bits up,
* except in units of 64 inputs: the scales ``[32 / n, 64]``, where n inputs share a scale, and the minima
  ``[64]`` if the encoding has minima.

Padding is 0. The tensor ``scales`` contains the row scales ``[N]`` of encodings that have them. In the shapes
of comments, P is the number of panels and G the number of groups of a panel.
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

_SCALE_DTYPES = {"u8": torch.uint8, "i8": torch.int8, "f16": torch.float16, "f32": torch.float32}
_LOW_BYTES = PANEL * GROUP // 2
"""Bytes of the low four bits of the codes of a group of a panel."""
_HIGH_BIT_SHIFTS = torch.tensor(
    [[8 * (k % 4) + 2 * (k // 8 * 2 + k % 8 // 4) for k in range(16)] for _ in range(2)]
)
"""Shifts that move the two high bits of each input of a group to their position in a word, ``[2, 16]``."""


class BlockPanels(PanelLayout):
    """Codes in groups of 32 inputs. Scales follow each group, or each unit of two groups."""

    dtype = DType.uint8

    def __init__(self, kind: BlockKind) -> None:
        self._kind = kind

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        kind = self._kind
        unit_bytes = kind.unit // GROUP * kind.group_bytes + kind.factor_bytes
        return (-(-out_features // PANEL), -(-in_features // kind.unit), PANEL * unit_bytes)

    def to_panels(self, rows: Mapping[str, Tensor]) -> Tensors:
        kind, codes = self._kind, rows["weight"]
        extra_rows, extra_inputs = -len(codes) % PANEL, -codes.shape[1] % kind.unit
        padded = F.pad(codes, (0, extra_inputs, 0, extra_rows))
        groups = padded.view(-1, PANEL, padded.shape[1] // GROUP, GROUP).transpose(1, 2)  # [P, G, 64, 32]
        pairs_of_codes = (groups & 15).reshape(*groups.shape[:3], 4, 2, 4).permute(0, 1, 3, 2, 5, 4)
        group_parts = [(pairs_of_codes[..., 0] | pairs_of_codes[..., 1] << 4).flatten(2)]  # [P, G, 1024]
        high_bits = (groups >> 4).long()
        if kind.bits == 5:
            group_parts.append(_split_words((high_bits << FIFTH_BITS.flatten()).sum(-1)))
        if kind.bits == 6:
            halves = high_bits.reshape(*high_bits.shape[:3], 2, 16)
            words = (halves << _HIGH_BIT_SHIFTS).sum(-1)  # [P, G, 64, 2]
            group_parts.append(_split_words(words.transpose(2, 3).flatten(2)))
        num_units = padded.shape[1] // kind.unit
        for name, inputs_per_number in (("scales", kind.scaled_inputs), ("minima", GROUP)):
            if name in rows and inputs_per_number <= GROUP:
                group_parts.append(
                    _to_bytes(rows[name], extra_rows, padded.shape[1] // GROUP, GROUP // inputs_per_number)
                )
        unit_groups = torch.cat(group_parts, dim=2).view(len(groups), num_units, -1)
        factors = [
            _to_bytes(rows[name], extra_rows, num_units, 1)
            for name in self._unit_tensor_names()
            if name in rows
        ]
        panels = {"panels": torch.cat([unit_groups, *factors], dim=2)}
        return panels | ({"scales": rows["row_scales"]} if kind.has_row_scales else {})

    def from_panels(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
        kind, panels = self._kind, tensors["panels"]
        unit_groups, *factors = torch.split(panels, self._unit_part_bytes(), dim=2)
        groups = unit_groups.reshape(len(panels), -1, PANEL * kind.group_bytes)  # [P, G, bytes]
        low_bits, high_bits, *scales = torch.split(groups, self._group_part_bytes(), dim=2)
        pairs = low_bits.reshape(*low_bits.shape[:2], 4, PANEL, 4)
        pairs_of_codes = torch.stack([pairs & 15, pairs >> 4], dim=-1)  # [P, G, 4, 64, 4, 2]
        codes = pairs_of_codes.permute(0, 1, 3, 2, 5, 4).flatten(3)  # [P, G, 64, 32]
        if kind.bits == 5:
            words = _join_words(high_bits)[..., None]  # [P, G, 64, 1]
            codes = codes | ((words >> FIFTH_BITS.flatten() & 1) << 4).to(torch.uint8)
        if kind.bits == 6:
            words = _join_words(high_bits).view(*high_bits.shape[:2], 2, PANEL)
            words = words.transpose(2, 3)[..., None]  # [P, G, 64, 2, 1]
            codes = codes | ((words >> _HIGH_BIT_SHIFTS & 3) << 4).flatten(3).to(torch.uint8)
        weight = codes.transpose(1, 2).flatten(2).flatten(0, 1)
        rows = {"weight": weight[:out_features, :in_features].contiguous()}

        def add(name: str, columns: Tensor, scale_type: str, inputs_per_number: int) -> None:
            numbers = columns.contiguous().view(_SCALE_DTYPES.get(scale_type, torch.uint8))
            table = numbers.view(*columns.shape[:2], -1, PANEL).flatten(1, 2).transpose(1, 2).flatten(0, 1)
            rows[name] = table[:out_features, : -(-in_features // inputs_per_number)].contiguous()

        if not kind.has_unit_scales:
            add("scales", scales[0], kind.scale_type, kind.scaled_inputs)
        if kind.min_type:
            add("minima", scales[1], kind.min_type, GROUP)
        for name, columns in zip(self._unit_tensor_names(), factors, strict=False):
            add(name, columns, kind.scale_type if kind.has_unit_scales else "f16", kind.unit)
        return rows | ({"row_scales": tensors["scales"]} if kind.has_row_scales else {})

    def _unit_tensor_names(self) -> tuple[str, ...]:
        """Return the names of the tensors that can follow the groups of a unit, in their order."""
        return ("scales",) if self._kind.has_unit_scales else ("factors", "min_factors")

    def _unit_part_bytes(self) -> list[int]:
        """Return the bytes of all groups of a panel's unit, then of each tensor that follows the groups."""
        kind = self._kind
        tensor_bytes = [SCALE_BYTES[kind.scale_type] * PANEL] if kind.has_unit_scales else []
        tensor_bytes = tensor_bytes or [2 * PANEL] * (kind.factor_bytes // 2)
        return [PANEL * kind.unit // GROUP * kind.group_bytes, *tensor_bytes]

    def _group_part_bytes(self) -> list[int]:
        """Return the bytes of each part of a group of a panel: low bits, high bits, scales, minima.

        Scales are omitted if they follow the groups, and minima if the encoding has none.
        """
        kind = self._kind
        high_bytes = PANEL * GROUP * (kind.bits - 4) // 8
        scale_bytes = PANEL * SCALE_BYTES[kind.scale_type] * (GROUP // kind.scaled_inputs)
        min_bytes = [PANEL * SCALE_BYTES[kind.min_type]] if kind.min_type else []
        return (
            [_LOW_BYTES, high_bytes]
            if kind.has_unit_scales
            else [_LOW_BYTES, high_bytes, scale_bytes, *min_bytes]
        )


def _to_bytes(numbers: Tensor, extra_rows: int, num_units: int, numbers_per_unit: int) -> Tensor:
    """Return scales, minima or factors as the bytes of P panels.

    The result is ``[P, num_units, numbers_per_unit * 64 * itemsize]`` uint8.

    Args:
        numbers: ``[out, n]`` with n at most ``num_units * numbers_per_unit``. Missing columns are zero in the
            result.
        extra_rows: number of zero rows that pad the last panel.
        num_units: number of units per panel, or of groups for numbers that follow each group.
        numbers_per_unit: how many numbers of an output follow each unit or group.
    """
    padded = F.pad(numbers, (0, num_units * numbers_per_unit - numbers.shape[1], 0, extra_rows))
    columns = padded.view(-1, PANEL, num_units, numbers_per_unit).permute(0, 2, 3, 1).contiguous()
    return columns.view(torch.uint8).flatten(2)


def _split_words(words: Tensor) -> Tensor:
    """Return the bytes ``[P, G, 4 n]`` of the 32-bit words in an int64 tensor ``[P, G, n]``."""
    return (words[..., None] >> torch.arange(0, 32, 8) & 255).to(torch.uint8).flatten(2)


def _join_words(words: Tensor) -> Tensor:
    """Return the 32-bit words of bytes ``[P, G, 4 n]``, as int64 ``[P, G, n]``."""
    return (words.reshape(*words.shape[:2], -1, 4).long() << torch.arange(0, 32, 8)).sum(-1)
