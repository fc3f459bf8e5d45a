"""Panels: weights in the order in which a CPU multiplies them, 64 outputs next to each other.

This module defines in torch the layouts that the C++ kernels read. All are little-endian and contiguous. N is
the number of outputs, rounded up to whole panels. K is the number of inputs, rounded up to a multiple of the
inputs that a layout stores together: 1, 2, 4 or 32. Padding weights are 0. The layouts are:

* `FloatPanels` with 1 term: ``[N / 64, K, 64]``.
* `FloatPanels` with 2 terms: ``[N / 64, K / 2, 64, 2]``. Two inputs are adjacent, as the dot product
  instruction reads them.
* `Int8Panels`: ``[N / 64, K / 4, 64, 4]`` uint8, the integer + 128, and one float32 scale per output, not
  padded.
* `GroupPanels` of 4 bits: ``[N / 64, K / 32, 1152]`` uint8. A group of 32 inputs has 1024 bytes, which
  store each integer + 8, in four steps ``[64, 4]`` of 8 inputs. Byte j of an output holds input j in its low
  half and input j + 4 in its high half. The 64 float16 scales of the group follow.
* `GroupPanels` of 5 bits: ``[N / 64, K / 32, 1408]`` uint8. The low four bits of each integer + 16 are
  stored like integers of 4 bits. Then a little-endian 32-bit word per output holds the fifth bits: bit
  8 j + 2 s belongs to input j of step s, and the next bit to input j + 4 (j < 4). The scales follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.dtype import DType
from penstock.kernels.encodings._sizes import GROUP, PANEL, group_bytes

LAYOUTS_VERSION = 6
"""Version of the layouts and of the numbers that packing computes. Files of packed weights contain it.
Increase it when a layout or the numbers change."""

_LOW_BYTES = PANEL * GROUP // 2  # bytes of the low four bits of a group's integers
FIFTH_BITS = torch.tensor(
    [[8 * j + 2 * step + half for half in (0, 1) for j in range(4)] for step in range(4)]
)
"""Positions of the fifth bits of a group's inputs, ``[4, 8]``."""

Tensors = dict[str, Tensor]


class PanelLayout(ABC):
    """The panel layout of the packed weights of an encoding.

    Attributes:
        dtype: element type of the tensor ``panels``.
    """

    dtype: DType

    @abstractmethod
    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Return the shape of the tensor ``panels`` of a weight ``[out, in]``."""

    @abstractmethod
    def to_panels(self, rows: Mapping[str, Tensor]) -> Tensors:
        """Return a weight in this layout; ``rows`` are the tensors of `LinearEncoding.pack`."""

    @abstractmethod
    def from_panels(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
        """Return the tensors ``rows`` from which `to_panels` computed ``tensors``."""


class FloatPanels(PanelLayout):
    """Floats. ``terms`` consecutive inputs of an output are adjacent."""

    def __init__(self, dtype: DType, terms: int) -> None:
        self.dtype = dtype
        self._terms = terms

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        shape = (-(-out_features // PANEL), -(-in_features // self._terms), PANEL)
        return shape if self._terms == 1 else (*shape, self._terms)

    def to_panels(self, rows: Mapping[str, Tensor]) -> Tensors:
        panels = _interleave_rows(rows["weight"], self._terms)
        return {"panels": panels.flatten(2) if self._terms == 1 else panels}

    def from_panels(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
        panels = tensors["panels"]
        panels = panels[..., None] if self._terms == 1 else panels
        return {"weight": _restore_rows(panels, out_features, in_features)}


class Int8Panels(PanelLayout):
    """8-bit integers with a scale per output. Four consecutive inputs of an output are adjacent."""

    dtype = DType.uint8

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return (-(-out_features // PANEL), -(-in_features // 4), PANEL, 4)

    def to_panels(self, rows: Mapping[str, Tensor]) -> Tensors:
        panels = (_interleave_rows(rows["weight"], 4).short() + 128).to(torch.uint8)
        return {"panels": panels, "scales": rows["scales"]}

    def from_panels(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
        weight = (tensors["panels"].short() - 128).to(torch.int8)
        return {"weight": _restore_rows(weight, out_features, in_features), "scales": tensors["scales"]}


class GroupPanels(PanelLayout):
    """Integers of 4 or 5 bits in groups of 32 inputs. The scales of a group follow its integers."""

    dtype = DType.uint8

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return (-(-out_features // PANEL), -(-in_features // GROUP), PANEL * group_bytes(self._bits))

    def to_panels(self, rows: Mapping[str, Tensor]) -> Tensors:
        weight, scales = rows["weight"], rows["scales"]
        extra_rows, offset = -weight.shape[0] % PANEL, 1 << self._bits - 1
        integers = F.pad(weight.short() + offset, (0, -weight.shape[1] % GROUP, 0, extra_rows), value=offset)
        groups = integers.view(-1, PANEL, scales.shape[1], GROUP).transpose(1, 2)  # [P, G, 64, 32]
        steps = (
            (groups & 15).view(*groups.shape[:3], 4, 2, 4).permute(0, 1, 3, 2, 5, 4)
        )  # [P, G, 4, 64, 4, 2]
        low_bytes = (steps[..., 0] | steps[..., 1] << 4).to(torch.uint8).flatten(2)  # [P, G, 1024]
        fifth_bit_words = ((groups >> 4).long() << FIFTH_BITS.flatten()).sum(-1)  # [P, G, 64]
        fifth_bits = fifth_bit_words[..., None] >> torch.arange(0, 32, 8) & 255
        fifth_bit_bytes = fifth_bits.to(torch.uint8).flatten(2)  # [P, G, 256]
        scale_columns = F.pad(scales, (0, 0, 0, extra_rows)).view(-1, PANEL, scales.shape[1]).transpose(1, 2)
        scale_bytes = scale_columns.contiguous().view(torch.uint8)  # [P, G, 128]
        return {
            "panels": torch.cat(
                [low_bytes, fifth_bit_bytes, scale_bytes] if self._bits > 4 else [low_bytes, scale_bytes],
                dim=2,
            )
        }

    def from_panels(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensors:
        panels = tensors["panels"]
        low_bytes, scale_bytes = panels[..., :_LOW_BYTES], panels[..., -2 * PANEL :]
        pairs = low_bytes.reshape(*low_bytes.shape[:2], 4, PANEL, 4).short()  # [P, G, 4, 64, 4]
        steps = torch.stack([pairs & 15, pairs >> 4], dim=-1)  # [P, G, 4, 64, 4, 2]
        groups = steps.permute(0, 1, 3, 2, 5, 4).flatten(3)  # [P, G, 64, 32]
        if self._bits > 4:
            fifth_bit_bytes = panels[..., _LOW_BYTES : -2 * PANEL]
            shifted_bytes = fifth_bit_bytes.reshape(
                *fifth_bit_bytes.shape[:2], PANEL, 4
            ).long() << torch.arange(0, 32, 8)
            groups = groups | (shifted_bytes.sum(-1, keepdim=True) >> FIFTH_BITS.flatten() & 1).short() << 4
        integers = (groups - (1 << self._bits - 1)).to(torch.int8).transpose(1, 2).flatten(2).flatten(0, 1)
        scales = scale_bytes.contiguous().view(torch.float16).transpose(1, 2).flatten(0, 1)
        return {
            "weight": integers[:out_features, :in_features].contiguous(),
            "scales": scales[:out_features].contiguous(),
        }


def _interleave_rows(weight: Tensor, terms: int) -> Tensor:
    """Return ``[N, K]`` as ``[N / 64, K / terms, 64, terms]``, padded with zeros."""
    out_features, in_features = weight.shape
    padded = F.pad(weight, (0, -in_features % terms, 0, -out_features % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // terms, terms).transpose(1, 2).contiguous()


def _restore_rows(panels: Tensor, out_features: int, in_features: int) -> Tensor:
    """Invert `_interleave_rows`: return ``[out, in]``."""
    rows = panels.transpose(1, 2).flatten(2).flatten(0, 1)
    return rows[:out_features, :in_features].contiguous()
