"""Reads the blocks of GGUF files as codes and scales, for the encodings that represent them exactly.

A reader is a function from blocks ``[N, bytes]`` to the tensors of an encoding, with one row for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.weights.gguf import BLOCK_SIZES
from penstock.weights.gguf_blocks import expand_bits, k_codes, k_fifth_bits, k_scales, nibbles, q6_k_codes
from penstock.weights.gguf_names import GGUFTensor

Rows = dict[str, Tensor]


def gguf_rows(data: Tensor, header: GGUFTensor) -> Rows:
    """Return a weight ``[out, in]`` as the tensors of its encoding, such as ``weight`` and ``scales``.

    Args:
        data: all bytes of the file, uint8.
        header: the header of the tensor.
    """
    out_features = header.shape[1 if header.is_transposed else 0]
    stored_bytes = data[header.offset : header.offset + header.num_bytes]
    blocks = ROW_READERS[header.type_name](stored_bytes.view(-1, BLOCK_SIZES[header.type_name]))
    rows = {name: tensor.reshape(out_features, -1) for name, tensor in blocks.items()}
    rows = {name: reorder_rows(tensor, header) for name, tensor in rows.items()}
    if header.type_name == "Q8_0":
        rows["row_scales"] = torch.ones(out_features)
    return rows


def reorder_rows(rows: Tensor, header: GGUFTensor) -> Tensor:
    """Return rows ``[out, ...]`` in the order of the Hugging Face checkpoint.

    Interleaved rows of a head are reordered from ``0 D/2 1 D/2+1 ...`` to ``0 1 2 ...``. Fused rows are
    reordered from all queries, all keys, all values to the query, key and value of each head.
    """
    if header.num_interleaved_heads:
        pairs = rows.view(header.num_interleaved_heads, -1, 2, *rows.shape[1:])  # [H, D / 2, 2, ...]
        return pairs.transpose(1, 2).reshape(rows.shape)
    if header.num_fused_heads:
        parts = rows.view(3, header.num_fused_heads, -1, *rows.shape[1:])  # [3, H, D, ...]
        return parts.transpose(0, 1).reshape(rows.shape)
    return rows


def _read_float16(blocks: Tensor, start: int) -> Tensor:  # the float16 at byte `start`: [N, 1]
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _q4_0(blocks: Tensor) -> Rows:
    return {"weight": nibbles(blocks[:, 2:]).to(torch.int8) - 8, "scales": _read_float16(blocks, 0)}


def _q5_0(blocks: Tensor) -> Rows:
    codes = nibbles(blocks[:, 6:]) | expand_bits(blocks[:, 2:6]) << 4
    return {"weight": codes.to(torch.int8) - 16, "scales": _read_float16(blocks, 0)}


def _q8_0(blocks: Tensor) -> Rows:
    scales = _read_float16(blocks, 0)
    zeros = torch.full(scales.shape, 128, dtype=torch.uint8)
    return {"weight": blocks[:, 2:] ^ 128, "scales": scales, "zeros": zeros}


def _q4_1(blocks: Tensor) -> Rows:
    return {
        "weight": nibbles(blocks[:, 4:]),
        "scales": _read_float16(blocks, 0),
        "minima": -_read_float16(blocks, 2),
    }


def _q5_1(blocks: Tensor) -> Rows:
    codes = nibbles(blocks[:, 8:]) | expand_bits(blocks[:, 4:8]) << 4
    return {"weight": codes, "scales": _read_float16(blocks, 0), "minima": -_read_float16(blocks, 2)}


def _q4_k(blocks: Tensor) -> Rows:
    return {"weight": k_codes(blocks[:, 16:]).flatten(1), **_k_scale_tensors(blocks)}


def _q5_k(blocks: Tensor) -> Rows:
    codes = k_codes(blocks[:, 48:]) | k_fifth_bits(blocks[:, 16:48]) << 4
    return {"weight": codes.flatten(1), **_k_scale_tensors(blocks)}


def _k_scale_tensors(blocks: Tensor) -> Rows:
    scales, minima = k_scales(blocks)
    return {
        "scales": scales,
        "minima": minima,
        "factors": _read_float16(blocks, 0),
        "min_factors": _read_float16(blocks, 2),
    }


def _q6_k(blocks: Tensor) -> Rows:
    return {
        "weight": q6_k_codes(blocks),
        "scales": blocks[:, 192:208].contiguous().view(torch.int8),
        "factors": _read_float16(blocks, 208),
    }


def _mxfp4(blocks: Tensor) -> Rows:
    return {"weight": nibbles(blocks[:, 1:]), "scales": blocks[:, :1]}


ROW_READERS: Mapping[str, Callable[[Tensor], Rows]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
"""Type name -> reader of its blocks."""
