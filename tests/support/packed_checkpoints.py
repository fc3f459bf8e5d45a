"""Small quantizers that write packed checkpoints, written from the documents of the formats.

The quantizers share no code with the package. A packer takes a weight ``[out, in]``, and returns the tensors
of the packed layer, without the layer's name, and the dequantized weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
Packer = Callable[[Tensor], Packed]


def quantized_groups(
    weight: Tensor, bits: int, group_size: int, *, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes ``[out, in]``, scales and zero points ``[out, G]``, and the dequantized weight.

    A group size below 1 means one group for all inputs.
    """
    group_size = weight.shape[1] if group_size < 1 else group_size
    groups = weight.float().unflatten(1, (-1, group_size))
    max_code = 2**bits - 1
    if symmetric:
        scales = (groups.abs().amax(-1) / (max_code / 2)).to(dtype)
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / max_code).clamp_min(1e-4).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, max_code).long()
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, max_code).long()
    dequantized = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.flatten(1), scales, zeros, dequantized.flatten(1)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack each row of codes as a bit stream in int32 words, lowest bits first."""
    array = codes.numpy().astype(np.uint8)
    stream = (array[..., None] >> np.arange(bits) & 1).reshape(len(array), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32).copy())


InputOrder = Literal["none", "inputs", "layer"]
"""The order in which the inputs of a layer are divided into groups.

``none`` keeps the order. ``inputs`` is a random order that all layers with an equal number of inputs share.
``layer`` is a different random order for each layer.
"""


def input_permutation(num_inputs: int, order: InputOrder) -> Tensor:
    if order == "none":
        return torch.arange(num_inputs)
    generator = torch.Generator().manual_seed(num_inputs) if order == "inputs" else None
    return torch.randperm(num_inputs, generator=generator)


def gptq(
    bits: int = 4, size: int = 32, *, version: int = 1, symmetric: bool = False, order: InputOrder = "none"
) -> Packer:
    def pack(weight: Tensor) -> Packed:
        inputs = weight.shape[1]
        permutation = input_permutation(inputs, order)
        codes, scales, zeros, dequantized = quantized_groups(
            weight[:, permutation], bits, size, symmetric=symmetric
        )
        inverse = permutation.argsort()
        input_groups = (torch.arange(inputs) // (size if size > 0 else inputs))[inverse].int()
        if version == 1:
            zeros = (zeros - 1).clamp_min(0)  # version 1 stores the zero point minus 1
            dequantized = (codes - (zeros + 1)[:, input_groups[permutation]]) * scales.float()[
                :, input_groups[permutation]
            ]
        tensors = {
            "qweight": pack_words(codes[:, inverse], bits).T.contiguous(),
            "qzeros": pack_words(zeros.T.contiguous(), bits),
            "scales": scales.T.contiguous(),
            "g_idx": input_groups,
        }
        return tensors, dequantized[:, inverse]

    return pack


def awq(size: int = 32, version: str = "gemm") -> Packer:
    def pack(weight: Tensor) -> Packed:
        codes, scales, zeros, dequantized = quantized_groups(weight, 4, size, symmetric=False)
        if version == "gemv":
            width = -(-zeros.shape[1] // 8) * 8 * (1 if size >= 128 else 128 // size)
            padding = (0, width - zeros.shape[1])
            return {
                "qweight": pack_words(codes, 4),
                "qzeros": pack_words(torch.nn.functional.pad(zeros, padding), 4),
                "scales": torch.nn.functional.pad(scales, padding),
            }, dequantized

        def columns(values: Tensor) -> Tensor:
            order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
            return pack_words(values.T.contiguous().unflatten(1, (-1, 8))[..., order].flatten(1), 4)

        return {
            "qweight": columns(codes),
            "qzeros": columns(zeros),
            "scales": scales.T.contiguous(),
        }, dequantized

    return pack


def to_e4m3(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8(
    block: tuple[int, int] | None = None, *, per_tensor: bool = False, name: str = "weight_scale"
) -> Packer:
    def pack(weight: Tensor) -> Packed:
        rows, columns = block or ((weight.shape[0] if per_tensor else 1), weight.shape[1])
        padding = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
        blocks = (
            torch.nn.functional.pad(weight.float(), padding)
            .unflatten(0, (-1, rows))
            .unflatten(2, (-1, columns))
        )
        scales = blocks.abs().amax((1, 3)) / 448
        weight_scales = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        weight_scales = weight_scales[: weight.shape[0], : weight.shape[1]]
        values = to_e4m3(weight.float() / weight_scales)
        tensors = {"weight": values, name: scales.reshape(()) if per_tensor else scales}
        return tensors, values.float() * weight_scales

    return pack


def compressed_codes(
    bits: int = 4,
    size: int = 32,
    *,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    order: InputOrder = "none",
) -> Packer:
    def pack(weight: Tensor) -> Packed:
        permutation = input_permutation(weight.shape[1], order)
        inverse = permutation.argsort()
        codes, scales, zeros, dequantized = quantized_groups(
            weight[:, permutation], bits, size, symmetric=symmetric, dtype=dtype
        )
        codes, dequantized = codes[:, inverse], dequantized[:, inverse]
        tensors = {"weight_packed": pack_words(codes, bits), "weight_scale": scales}
        if order != "none":
            tensors["weight_g_idx"] = (torch.arange(weight.shape[1]) // size)[inverse].int()
        tensors["weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            tensors["weight_zero_point"] = pack_words(zeros.T.contiguous(), bits).T.contiguous()
        return tensors, dequantized

    return pack


def int8_rows(weight: Tensor) -> Packed:
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    integers = (weight.float() / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": integers, "weight_scale": scales}, integers.float() * scales.float()


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _fp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return 4-bit floats, packed two per byte, and their values."""
    index = (values.abs()[..., None] - E2M1).abs().argmin(-1)
    codes = index | (values < 0).long() << 3
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), E2M1[index] * torch.where(
        values < 0, -1.0, 1.0
    )


def nvfp4(tool: str) -> Packer:
    def pack(weight: Tensor) -> Packed:
        groups = weight.float().unflatten(1, (-1, 16))
        tensor_scale = weight.float().abs().max() / (6 * 448)
        scales = to_e4m3(groups.abs().amax(-1) / 6 / tensor_scale)
        weight_scales = (scales.float() * tensor_scale).repeat_interleave(16, 1)
        packed_bytes, values = _fp4(weight.float() / weight_scales.clamp_min(1e-12))
        if tool == "modelopt":
            return {
                "weight": packed_bytes,
                "weight_scale": scales,
                "weight_scale_2": tensor_scale,
            }, values * weight_scales
        divisor = (1 / tensor_scale).reshape(1)
        tensors = {"weight_packed": packed_bytes, "weight_scale": scales, "weight_global_scale": divisor}
        return tensors, values * (scales.float() / divisor).repeat_interleave(16, 1)

    return pack


def mxfp4(weight: Tensor) -> Packed:
    groups = weight.float().unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1).log2().floor() - 2).clamp(-127, 127)
    weight_scales = (2.0**exponents).repeat_interleave(32, 1)
    packed_bytes, values = _fp4(weight.float() / weight_scales)
    return {
        "weight_packed": packed_bytes,
        "weight_scale": (exponents + 127).to(torch.uint8),
    }, values * weight_scales


NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
BNB_FP4 = torch.tensor([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
BNB_TABLES = {"nf4": NF4, "fp4": torch.cat([BNB_FP4, -BNB_FP4])}


def bitsandbytes(
    number_format: str = "nf4", block: int = 64, *, nested: bool = False, table: Tensor | None = None
) -> Packer:
    def pack(weight: Tensor) -> Packed:
        values = BNB_TABLES[number_format] if table is None else table
        flat_weight = weight.float().flatten()
        blocks = torch.nn.functional.pad(flat_weight, (0, -len(flat_weight) % block)).view(-1, block)
        factors = blocks.abs().amax(1)
        tensors = {"weight.quant_map": values.clone(), "weight.absmax": factors}
        state = {
            "quant_type": number_format,
            "blocksize": block,
            "dtype": "float32",
            "shape": list(weight.shape),
        }
        if nested:
            offset, nested_map = factors.mean(), torch.linspace(-1, 1, 256)
            padded = torch.nn.functional.pad(factors - offset, (0, -len(factors) % 256)).view(-1, 256)
            outer_factors = padded.abs().amax(1)
            indices = ((padded / outer_factors[:, None])[..., None] - nested_map).abs().argmin(-1)
            factors = (nested_map[indices] * outer_factors[:, None]).flatten()[: len(factors)] + offset
            tensors["weight.absmax"] = indices.flatten()[: len(factors)].to(torch.uint8)
            tensors |= {"weight.nested_absmax": outer_factors, "weight.nested_quant_map": nested_map}
            state |= {"nested_blocksize": 256, "nested_offset": float(offset)}
        codes = ((blocks / factors[:, None])[..., None] - values).abs().argmin(-1)
        dequantized = (values[codes] * factors[:, None]).flatten()[: len(flat_weight)].view(weight.shape)
        pairs = codes.flatten()[: len(flat_weight)].view(-1, 2)
        tensors["weight"] = (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8)
        text = torch.tensor(list(json.dumps(state).encode())).to(torch.uint8)
        return tensors | {f"weight.quant_state.bitsandbytes__{number_format}": text}, dequantized

    return pack


def torchao_int4(size: int = 32) -> Packer:
    """Return a packer of signed 4-bit integers, two per byte, with float zero points."""

    def pack(weight: Tensor) -> Packed:
        groups = weight.float().unflatten(1, (-1, size))
        low, high = groups.amin(2), groups.amax(2)
        scales = ((high - low) / 15).bfloat16()
        zeros = (low + 8 * scales.float()).bfloat16()
        integers = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round().clamp(-8, 7)
        dequantized = integers * scales.float()[..., None] + zeros.float()[..., None]
        codes = integers.flatten(1).to(torch.int8)
        return {
            "_weight_qdata": codes[:, ::2] & 15 | codes[:, 1::2] << 4,
            "_weight_scale": scales.T.contiguous(),
            "_weight_zero_point": zeros.T.contiguous(),
        }, dequantized.flatten(1)

    return pack


def write_packed_checkpoint(
    checkpoint: Path,
    folder: Path,
    packer: Packer | Mapping[str, Packer],
    section: Mapping[str, Any],
    *,
    ignore: tuple[str, ...] = (),
    extra: Mapping[str, Tensor] | None = None,
    num_shards: int = 1,
) -> Path:
    """Write a checkpoint with packed linear layers. Write its dequantized weights to ``folder/plain``.

    Args:
        checkpoint: the float checkpoint.
        folder: the folder to write.
        packer: a packer for all layers, or a mapping from a part of a layer name to a packer; the first match
            is used.
        section: the ``quantization_config`` of ``config.json``.
        ignore: parts of the names of layers that are not packed.
        extra: additional tensors.
        num_shards: number of files.
    """
    packed_tensors, plain_tensors = {}, {}
    torch.manual_seed(0)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        is_linear = name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))
        if not is_linear or any(name_part in name for name_part in ignore):
            packed_tensors[name] = plain_tensors[name] = tensor
            continue
        layer_packer = (
            packer
            if callable(packer)
            else next(named_packer for name_part, named_packer in packer.items() if name_part in name)
        )
        tensors, dequantized = layer_packer(tensor)
        packed_tensors |= {f"{layer}.{key}": value.contiguous() for key, value in tensors.items()}
        plain_tensors[name] = dequantized.contiguous()
    packed_tensors |= extra or {}
    config = json.loads((checkpoint / "config.json").read_text())
    (folder / "plain").mkdir(parents=True, exist_ok=True)
    save_file(plain_tensors, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    (folder / "plain" / "config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(section)}))
    if num_shards == 1:
        save_file(packed_tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(packed_tensors)
    files = {name: f"model-{number % num_shards}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: packed_tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder
