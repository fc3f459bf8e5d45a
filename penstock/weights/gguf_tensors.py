"""`gguf_tensor`: reads the tensors of GGUF files as floats.

`penstock.weights.gguf_rows` reads the codes and scales of quantized tensors instead.
"""

from __future__ import annotations

from torch import Tensor

from penstock.weights.gguf import BLOCK_SIZES
from penstock.weights.gguf_blocks import READERS, dequantize
from penstock.weights.gguf_names import PACKAGE_BLOCKS, GGUFTensor
from penstock.weights.gguf_rows import reorder_rows


def gguf_tensor(data: Tensor, header: GGUFTensor) -> Tensor:
    """Return a tensor as floats, in the shape and row order of the Hugging Face checkpoint.

    The result is a view of ``data`` if the tensor is stored as floats in this order, without an offset.

    Args:
        data: all bytes of the file, uint8.
        header: the header of the tensor.
    """
    stored_bytes = data[header.offset : header.offset + header.num_bytes]
    if header.type_name in READERS or header.type_name in PACKAGE_BLOCKS:
        numbers = dequantize(stored_bytes.view(-1, BLOCK_SIZES[header.type_name]), header.type_name)
    else:
        assert header.dtype is not None
        numbers = stored_bytes.view(header.dtype.to_torch())
    if header.is_transposed:
        return numbers.view(header.shape[::-1]).T
    tensor = numbers.view(header.shape)
    tensor = reorder_rows(tensor, header)
    return tensor - header.weight_offset if header.weight_offset else tensor
