"""Write the reference layers of the quantization tests, with the library that defines each format.

A file of ``tests/weights/quantized_layers`` has the tensors of a layer ``model.layers.0.mlp.up_proj``, as the
library stores them. The tensor ``expected`` is the dequantized weight. The library computes ``expected``,
unless the function that returns the layer states another source. The metadata is ``quantization_config`` and
the metadata of the library.

    pip install compressed-tensors bitsandbytes torchao gptqmodel autoawq
    python tools/write_quantized_layers.py [NAME ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1] / "tests" / "weights" / "quantized_layers"
LAYER = "model.layers.0.mlp.up_proj"

ReferenceLayer = tuple[dict[str, Tensor], Tensor, dict[str, Any]]
"""The tensors of the layer, the dequantized weight, and ``quantization_config``."""
_METADATA = "metadata"
"""Key of ``quantization_config`` for the safetensors metadata of the library. `main` removes the key."""

COMPRESSED: dict[str, dict[str, Any]] = {
    "w4-symmetric": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "w4-asymmetric": {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 64},
    "w4-actorder": {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "weight"},
    "w3-channel": {"num_bits": 3, "strategy": "channel"},
    "w8-channel": {"num_bits": 8, "strategy": "channel"},
    "w8a8": {"num_bits": 8, "strategy": "channel", "activations": {"num_bits": 8, "strategy": "token"}},
    "fp8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8-channel": {
        **{"num_bits": 8, "type": "float", "strategy": "channel"},
        "activations": {"num_bits": 8, "type": "float", "strategy": "token"},
    },
    "fp8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 64]},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
}


def layer() -> nn.Linear:
    """Return the layer that all libraries except gptqmodel and autoawq quantize."""
    torch.manual_seed(0)
    return nn.Linear(128, 48, bias=False).bfloat16()


def compressed_tensors(weights: dict[str, Any]) -> ReferenceLayer:
    """Return a layer that compressed-tensors compresses."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight_settings = {"type": "int", "symmetric": True, **weights}
    activations = weight_settings.pop("activations", None)
    scale_types = {16: torch.float8_e4m3fn, 32: torch.uint8} if weight_settings["type"] == "float" else {}
    scale_type = scale_types.get(weight_settings.get("group_size"))
    if scale_type is not None:
        weight_settings |= {"scale_dtype": scale_type, "zp_dtype": scale_type}
    arguments = QuantizationArgs(**weight_settings)
    model = nn.Sequential()
    model.add_module("proj", layer())
    inputs = QuantizationArgs(**{"type": "int", "dynamic": True, **activations}) if activations else None
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=inputs)
    config = QuantizationConfig(config_groups={"group_0": scheme})
    apply_quantization_config(model, config)
    linear, weight = model.proj, model.proj.weight.data
    strategy, global_scale_tensor = weight_settings["strategy"], None
    if strategy == "block":
        rows, columns = weight_settings["block_structure"]
        blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif strategy == "tensor":
        low, high = weight.amin(), weight.amax()
    else:
        groups = weight.unflatten(1, (-1, weight_settings.get("group_size", weight.shape[1])))
        low, high = groups.amin(-1), groups.amax(-1)
    if strategy == "tensor_group":
        global_scale_tensor = generate_gparam(weight.amin(), weight.amax()).reshape(1)
        linear.weight_global_scale.data = global_scale_tensor
    scale, zero = calculate_qparams(low, high, arguments, global_scale=global_scale_tensor)
    linear.weight_scale.data = scale.reshape(linear.weight_scale.shape)
    linear.weight_zero_point.data = zero.reshape(linear.weight_scale.shape).to(linear.weight_zero_point.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tensors = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    compressor.decompress_model(model)
    quantization_config = (
        json.loads(compressor.quantization_config.model_dump_json()) if compressor.quantization_config else {}
    )
    return (
        tensors,
        model.proj.weight.data.clone(),
        {**quantization_config, "quant_method": "compressed-tensors"},
    )


def bitsandbytes_4_bits(kind: str, nested: bool) -> ReferenceLayer:
    """Return an nf4 or fp4 layer. With ``nested``, its scales are quantized too (double quantization)."""
    from bitsandbytes import functional

    weight = layer().weight.data
    packed, state = functional.quantize_4bit(
        weight, quant_type=kind, compress_statistics=nested, blocksize=64
    )
    tensors = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    expected = functional.dequantize_4bit(packed, state)
    return {"weight": packed, **tensors}, expected, {"quant_method": "bitsandbytes", "load_in_4bit": True}


def bitsandbytes_int8() -> ReferenceLayer:
    """Return an int8 layer. ``expected`` follows from the definition of the format."""
    from bitsandbytes import nn as layers

    weight = layer().weight.data.half()
    linear = layers.Linear8bitLt(128, 48, bias=False, has_fp16_weights=False)
    linear.weight = layers.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    tensors = dict(linear.to("cpu").state_dict())
    expected = tensors["weight"].float() * tensors["SCB"][:, None] / 127
    return tensors, expected, {"quant_method": "bitsandbytes", "load_in_8bit": True}


def layer_with_scales_and_zeros(group_size: int, bits: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return a layer of float16, and scales and zero points ``[out, G]`` for groups of its inputs."""
    torch.manual_seed(0)
    linear = nn.Linear(128, 64, bias=False).half()
    groups = linear.weight.data.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
    return linear, scales, zeros


def gptqmodel(bits: int, desc_act: bool, version: int = 2) -> ReferenceLayer:
    """Return a layer that gptqmodel packs, in the first or the second version of the format."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    group_size = 32
    linear, scales, zeros = layer_with_scales_and_zeros(group_size, bits)
    order = torch.randperm(128) if desc_act else torch.arange(128)
    group_indices = (torch.arange(128) // group_size)[order.argsort()].int()
    packed = TorchLinear(bits, group_size, False, desc_act, 128, 64, register_buffers=True)
    packed.pack_original(linear, scales, zeros, group_indices)
    packed.post_init()
    expected = packed.dequantize_weight().T.clone()
    quantization_config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": desc_act,
    }
    quantization_config["checkpoint_format"] = "gptq_v2" if version == 2 else "gptq"
    if version == 1:
        convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits=bits, group_size=group_size))
    names = ("qweight", "qzeros", "scales", "g_idx")
    return {name: getattr(packed, name).clone() for name in names}, expected, quantization_config


def autoawq(version: str) -> ReferenceLayer:
    """Return a layer that autoawq packs. ``expected`` follows from the definition of the format."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.gemv import WQLinear_GEMV

    group_size = 32
    linear, scales, zeros = layer_with_scales_and_zeros(group_size, 4)
    input_scales, input_zeros = (
        tensor.float().repeat_interleave(group_size, 1) for tensor in (scales, zeros)
    )
    codes = ((linear.weight.data.float() / input_scales).round() + input_zeros).clamp(0, 15)
    expected = (codes - input_zeros) * input_scales
    linear.weight.data = expected.half()
    if version == "gemm":
        packed = WQLinear_GEMM.from_linear(
            linear, 4, group_size, False, scales.T.contiguous(), zeros.T.contiguous()
        )
    else:
        packed = WQLinear_GEMV.from_linear(linear, 4, group_size, False, scales, zeros)
    quantization_config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": version,
        "zero_point": True,
    }
    return dict(packed.state_dict()), expected, quantization_config


def torchao(name: str, group_size: int | None = None, **options: Any) -> ReferenceLayer:
    """Return a layer that torchao quantizes."""
    import torchao.quantization as ao

    model = nn.Sequential()
    model.add_module("proj", layer())
    if group_size is not None:
        options["granularity"] = ao.PerGroup(group_size)
    ao.quantize_(model, getattr(ao, name)(version=2, **options))
    return torchao_tensors(model.proj.weight, model.proj.weight.dequantize())


def torchao_asymmetric() -> ReferenceLayer:
    """Return a layer that torchao quantizes to 4-bit integers with zero points."""
    from torchao.quantization import MappingType

    asymmetric = MappingType.ASYMMETRIC
    return torchao("IntxWeightOnlyConfig", group_size=64, weight_dtype=torch.int4, mapping_type=asymmetric)


def torchao_packed(group_size: int) -> ReferenceLayer:
    """Return a layer of torchao's `Int4Tensor`.

    torchao's quantizer needs a GPU. This function follows the documentation of the class.
    """
    from torchao.quantization import Int4Tensor

    groups = layer().weight.data.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / 15).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    integers = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round().clamp(-8, 7)
    expected = (integers * scales.float()[..., None] + zeros.float()[..., None]).flatten(1)
    codes = integers.flatten(1).to(torch.int8)
    packed = codes[:, ::2] & 15 | codes[:, 1::2] << 4
    sizes = [1, group_size], torch.Size(codes.shape)
    weight = Int4Tensor(packed, scales.T.contiguous(), zeros.T.contiguous(), *sizes)
    return torchao_tensors(weight, expected)


def torchao_tensors(weight: Tensor, expected: Tensor) -> ReferenceLayer:
    """Return the safetensors tensors and metadata that torchao writes for a weight."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    flat_tensors, metadata = flatten_tensor_state_dict({f"{LAYER}.weight": weight})
    tensors = {key.removeprefix(f"{LAYER}."): tensor for key, tensor in flat_tensors.items()}
    return tensors, expected, {"quant_method": "torchao", _METADATA: metadata}


def reference_layers() -> Iterator[tuple[str, Callable[[], ReferenceLayer]]]:
    """Yield the name of each file and the function that returns its layer."""
    for name, weights in COMPRESSED.items():
        yield f"compressed-tensors-{name}", lambda weights=weights: compressed_tensors(weights)
    for kind in ("nf4", "fp4"):
        yield f"bitsandbytes-{kind}", lambda kind=kind: bitsandbytes_4_bits(kind, False)
        yield f"bitsandbytes-nested-{kind}", lambda kind=kind: bitsandbytes_4_bits(kind, True)
    yield "bitsandbytes-int8", bitsandbytes_int8
    for bits in (2, 3, 4, 8):
        yield f"gptqmodel-w{bits}", lambda bits=bits: gptqmodel(bits, False)
        yield f"gptqmodel-v1-w{bits}", lambda bits=bits: gptqmodel(bits, False, 1)
    yield "gptqmodel-descact-w4", lambda: gptqmodel(4, True)
    yield "gptqmodel-descact-w8", lambda: gptqmodel(8, True, 1)
    for version in ("gemm", "gemv"):
        yield f"autoawq-{version}-w4", lambda version=version: autoawq(version)
    yield "torchao-int8", lambda: torchao("Int8WeightOnlyConfig")
    yield "torchao-fp8", lambda: torchao("Float8WeightOnlyConfig")
    for bits in (2, 4, 8):
        dtype = getattr(torch, f"int{bits}")
        yield (
            f"torchao-w{bits}-groups",
            lambda dtype=dtype: torchao("IntxWeightOnlyConfig", group_size=32, weight_dtype=dtype),
        )
    yield "torchao-w4-asymmetric", torchao_asymmetric
    yield "torchao-q4z-packed", lambda: torchao_packed(64)


def main() -> None:
    """Write the files that the command line names, or all files."""
    FOLDER.mkdir(exist_ok=True)
    for name, make_layer in reference_layers():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        tensors, expected, quantization_config = make_layer()
        library_metadata = quantization_config.pop(_METADATA, {})
        file_tensors = {f"{LAYER}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
        metadata = {"quantization_config": json.dumps(quantization_config), **library_metadata}
        save_file(
            file_tensors | {"expected": expected.contiguous()},
            FOLDER / f"{name}.safetensors",
            metadata=metadata,
        )
        print(name, {key: (str(tensor.dtype), list(tensor.shape)) for key, tensor in tensors.items()})


if __name__ == "__main__":
    main()
