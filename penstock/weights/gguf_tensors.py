"""Reads the tensors of GGUF files as torch tensors.

`gguf_tensor` reads floats, which the loader then packs in the encoding of the model. `gguf_rows` keeps the
codes and scales.
"""

from __future__ import annotations

from torch import Tensor

from penstock.weights.gguf import BLOCK_SIZES
from penstock.weights.gguf_blocks import READERS, dequantize
from penstock.weights.gguf_names import PACKAGE_BLOCKS, GGUFTensor
from penstock.weights.gguf_rows import reordered


def gguf_tensor(data: Tensor, header: GGUFTensor) -> Tensor:
    """Return one tensor as floats, in the shape and row order of its header.

    Plain floats that need no reordering are returned as a view of ``data``.

    Args:
        data: the bytes of the file.
        header: describes the tensor.
    """
    stored = data[header.offset : header.offset + header.num_bytes]
    if header.type_name in READERS or header.type_name in PACKAGE_BLOCKS:
        numbers = dequantize(stored.view(-1, BLOCK_SIZES[header.type_name]), header.type_name)
    else:
        assert header.dtype is not None
        numbers = stored.view(header.dtype.to_torch())
    if header.is_transposed:
        return numbers.view(header.shape[::-1]).T
    tensor = numbers.view(header.shape)
    tensor = reordered(tensor, header)
    return tensor - header.excess if header.excess else tensor
