"""Reads the tensors of GGUF files as torch tensors.

`gguf_tensor` reads floats, which the loader then packs in the encoding of the model. `gguf_rows` reads Q4_0
and Q8_0 blocks as integers and scales, for an encoding with the same groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.weights.gguf import BLOCK_SIZES
from penstock.weights.gguf_blocks import READERS, dequantize
from penstock.weights.gguf_names import PACKAGE_BLOCKS, GGUFTensor


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
    tensor = _reordered(tensor, header)
    return tensor - header.excess if header.excess else tensor


def gguf_rows(data: Tensor, header: GGUFTensor) -> dict[str, Tensor]:
    """Return the integers and scales of a weight that is stored in Q4_0 or Q8_0 blocks.

    Args:
        data: the bytes of its file.
        header: describes the tensor.

    Returns:
        Of Q4_0: ``weight`` int8 ``[out, in]`` and ``scales`` float16 ``[out, in / 32]``. Of Q8_0 the tensors
        of codes with zero points. Rows are in the order of the header.
    """
    in_features = header.shape[0 if header.is_transposed else 1]
    stored = data[header.offset : header.offset + header.num_bytes]
    blocks = stored.view(-1, in_features // 32, BLOCK_SIZES[header.type_name])  # [out, G, 18 or 34]
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    if header.type_name == "Q8_0":
        codes = (blocks[..., 2:] ^ 128).flatten(1)  # the integer plus 128
        codes, scales = _reordered(codes, header), _reordered(scales, header)
        zeros = torch.full(scales.shape, 128, dtype=torch.uint8)
        return {"weight": codes, "scales": scales, "zeros": zeros, "row_scales": torch.ones(len(codes))}
    codes = torch.cat([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], dim=2)
    integers = codes.flatten(1).to(torch.int8) - 8
    return {"weight": _reordered(integers, header), "scales": _reordered(scales, header)}


def _reordered(rows: Tensor, header: GGUFTensor) -> Tensor:
    """Return rows in the order of the checkpoint.

    The rows of a head are reordered from ``0 D/2 1 D/2+1 ...`` to ``0 1 2 ...``, fused rows from all queries,
    keys and values to query, key and value of each head.
    """
    if header.heads:
        pairs = rows.view(header.heads, -1, 2, *rows.shape[1:])  # [H, D / 2, 2, ...]
        return pairs.transpose(1, 2).reshape(rows.shape)
    if header.fused_heads:
        parts = rows.view(3, header.fused_heads, -1, *rows.shape[1:])  # [3, H, D, ...]
        return parts.transpose(0, 1).reshape(rows.shape)
    return rows
