"""The tensors of GGUF files as torch has them.

All numbers come as floats, which the model then packs in its own encoding. A packed encoding whose groups
are a block's could take the codes and scales of Q8_0 and Q4_0 as they are, rows reordered, without loss: it
would read them here, beside `gguf_tensor`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.pipelines.weights.gguf import BLOCK_SIZES
from penstock.pipelines.weights.gguf_blocks import READERS, dequantize
from penstock.pipelines.weights.gguf_names import GGUFTensor


def map_file(file: Path) -> Tensor:
    """The bytes of a file ``[size]``, mapped: read as it is looked at, and writes never reach the file.

    Raises:
        WeightsError: it cannot be mapped.
    """
    try:
        return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as problem:
        raise WeightsError(file, f"cannot be mapped: {problem}") from problem


def gguf_tensor(data: Tensor, header: GGUFTensor) -> Tensor:
    """One tensor, in the shape and order of its header.

    Args:
        data: the bytes of its file; plain floats that lie as they should are a view of them.
        header: which tensor.
    """
    stored = data[header.offset : header.offset + header.num_bytes]
    if header.type_name in READERS:
        numbers = dequantize(stored.view(-1, BLOCK_SIZES[header.type_name]), header.type_name)
    else:
        assert header.dtype is not None
        numbers = stored.view(header.dtype.to_torch())
    if header.is_transposed:
        return numbers.view(header.shape[::-1]).T
    tensor = numbers.view(header.shape)
    if header.heads:
        tensor = _unpaired(tensor, header.heads)
    return tensor - header.excess if header.excess else tensor


def _unpaired(rows: Tensor, heads: int) -> Tensor:
    """Within each head from ``0 D/2 1 D/2+1 ...``, pairs side by side, to ``0 1 2 ...``."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])  # [H, D / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)
