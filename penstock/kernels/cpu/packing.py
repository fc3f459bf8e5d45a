"""Packs weights from rows, the layout of checkpoints, into panels, and quantizes floats if required."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cpu.library import Kernels
from penstock.kernels.encodings import encoding_named
from penstock.kernels.encodings._sizes import PANEL

_BLOCKS = {
    **{"q4_k": 8, "q5_k": 9, "q6_k": 10, "q4_1": 11, "q5_1": 12, "mxfp4": 13, "nvfp4": 14},
    **{"nf4": 15, "fp4": 16, "q4_z": 17},
}
_BYTE_ENCODINGS = {"uint4": 5, "uint8": 6, "fp8": 7, **_BLOCKS}
"""The encodings whose rows are uint8 codes, one per weight, with their numbers in csrc/linear.inl.

Torch quantizes floats to these encodings. The kernel ``pack_codes`` packs the bytes without quantizing.
"""

ENCODING_CODES = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "int5": 4, **_BYTE_ENCODINGS}
"""The encodings for which there are C++ kernels, with their numbers in csrc/linear.inl."""

_SOURCE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""The types that the kernel ``pack`` reads, with their numbers in csrc/pack.inl."""


class PanelMemory(Protocol):
    """Allocates the memory of panels."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor, aligned to a cache line."""
        ...


def pack_panels(
    kernels: Kernels,
    memory: PanelMemory,
    encoding: str,
    parts: Sequence[Tensor],
    scales: Tensor | None = None,
    importance: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the panels and the separate scales of a weight, given in parts ``[out, in]`` along its outputs.

    The kernel reads the parts in place, for example from a mapped file, if they have contiguous rows and the
    same type, one of `_SOURCE_TYPES`, and start at the first output of a panel. Otherwise, and for
    `_BYTE_ENCODINGS`, they are copied first.

    Args:
        kernels: the kernels of one instruction set.
        memory: allocates the panels.
        encoding: one of `ENCODING_CODES`.
        parts: floats in the order of the outputs, or a single part of quantized integers.
        scales: the scales of quantized integers; None for floats.
        importance: ``[in]``, see `LinearEncoding.pack`. Only int4 and int5 use it.
    """
    if encoding in _BYTE_ENCODINGS:
        return pack_rows(kernels, memory, encoding, encoding_named(encoding).pack(torch.cat(tuple(parts))))
    if any(len(part) % PANEL for part in parts[:-1]) or len({part.dtype for part in parts}) > 1:
        parts = [torch.cat(tuple(parts))]
    rows, inputs = sum(len(part) for part in parts), parts[0].shape[1]
    panels = memory.empty(*_panels_shape(encoding, rows, inputs))
    tensors, group_size = {"panels": panels}, encoding_named(encoding).group_size
    if quantizes_activations(encoding) and group_size is None:
        tensors["scales"] = torch.empty(rows) if scales is None else scales.contiguous()
    written_scales = tensors.get("scales") if scales is None else None  # the kernel writes these scales
    group_scales = scales.contiguous() if group_size and scales is not None else None
    if importance is not None and group_size:  # padded to whole groups
        importance = F.pad(importance.float(), (0, -inputs % group_size), value=1.0).contiguous()
    first_output = 0
    for part in parts:
        source = part if part.dtype in _SOURCE_TYPES else part.float()
        source = source if source.stride(1) == 1 else source.contiguous()
        kernels.pack(
            ENCODING_CODES[encoding],
            _SOURCE_TYPES[source.dtype],
            source.data_ptr(),
            source.stride(0),
            0 if group_scales is None else group_scales.data_ptr(),
            panels[first_output // PANEL :].data_ptr(),
            0 if written_scales is None else written_scales[first_output:].data_ptr(),
            0 if importance is None else importance.data_ptr(),
            len(source),
            inputs,
        )
        first_output += len(part)
    return tensors


def pack_rows(
    kernels: Kernels, memory: PanelMemory, encoding: str, rows: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the panels and the separate scales of a weight that is already quantized.

    Args:
        kernels: the kernels of one instruction set.
        memory: allocates the panels.
        encoding: an encoding of `ENCODING_CODES` that is not a float encoding.
        rows: the tensors of `LinearEncoding.pack`.
    """
    if encoding not in _BYTE_ENCODINGS:
        return pack_panels(kernels, memory, encoding, [rows["weight"]], rows["scales"])
    codes, scales = rows["weight"], rows["scales"].contiguous()
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    zeros_or_minima = rows.get("zeros", rows.get("minima"))
    optional_tensors = [
        None if tensor is None else tensor.contiguous()
        for tensor in (zeros_or_minima, rows.get("factors"), rows.get("min_factors"))
    ]
    outputs, inputs = codes.shape
    panels = memory.empty(*_panels_shape(encoding, outputs, inputs))
    kernels.pack_codes(
        _BYTE_ENCODINGS[encoding],
        codes.data_ptr(),
        codes.stride(0),
        scales.data_ptr(),
        *(0 if tensor is None else tensor.data_ptr() for tensor in optional_tensors),
        panels.data_ptr(),
        outputs,
        inputs,
    )
    return {"panels": panels} | ({"scales": rows["row_scales"].contiguous()} if "row_scales" in rows else {})


def panels_size(encoding: str, rows: int, inputs: int) -> int:
    """Return the bytes of the panels of a weight ``[rows, inputs]``."""
    shape, dtype = _panels_shape(encoding, rows, inputs)
    return prod(shape) * dtype.itemsize


def _panels_shape(encoding: str, rows: int, inputs: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and type of the panels of a weight ``[rows, inputs]``."""
    layout = encoding_named(encoding).panels
    assert layout is not None, f"{encoding} weights have no panels"
    return layout.shape(rows, inputs), layout.dtype.to_torch()


def quantizes_activations(encoding: str) -> bool:
    """Return whether the encoding has C++ kernels and they quantize activations.

    Such kernels accept all types of `DTYPE_CODES`.
    """
    return encoding in ENCODING_CODES and encoding_named(encoding).activation_dtype is not None
