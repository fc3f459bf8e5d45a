"""Layers that quantization libraries wrote have the values that the libraries compute from them.

``tools/write_quantized_layers.py`` writes the layers. Damaged and unsupported layers are refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from penstock.errors import WeightsError
from penstock.weights import Weights

FOLDER = Path(__file__).parent / "quantized_layers"
LAYER = "model.layers.0.mlp.up_proj"
ENCODINGS = {
    "q4z": "q4_z",
    "w2": "uint4",
    "w4": "uint4",
    "w3": "uint4",
    "w8": "uint8",
    "w8a8": "int8",
    "fp8": "fp8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "int8": "int8",
    "nf4": "nf4",
    "fp4": "fp4",
    "int4": "uint4",
}
"""Part of a file name -> encoding of the layer. If several parts are keys, the last one applies."""


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.safetensors")), ids=lambda file: file.stem)
def test_the_weight_equals_that_of_the_library_in_its_encoding(file: Path, tmp_path: Path) -> None:
    with safe_open(file, "pt") as tensor_file:
        metadata = tensor_file.metadata()
    tensors = load_file(file)
    expected = tensors.pop("expected")
    quantization_config = json.loads(metadata.pop("quantization_config"))
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata or None)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization_config}))
    weights, name = Weights.open(tmp_path), f"{LAYER}.weight"
    assert weights.names == (name,)
    weight = weights.tensor(name, tuple(expected.shape)).float()
    # The tolerance is the rounding error of the library: it rounds dequantized weights to `expected.dtype`.
    tolerance = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(expected.dtype, 1e-6)
    torch.testing.assert_close(weight, expected.float(), rtol=tolerance, atol=1e-6)
    assert not torch.equal(weight, weight.roll(1, 1))
    expected_encoding = [
        ENCODINGS[name_part] for name_part in file.stem.split("-") if name_part in ENCODINGS
    ][-1]
    if file.stem.endswith("fp8-block"):
        expected_encoding = None  # no encoding has blocks of 64 inputs, so the weight is read as floats
    assert weights.stored_encoding(name) == expected_encoding
    weights.finish()


def read_error(
    tensors: dict[str, torch.Tensor], method: str, folder: Path, metadata: dict[str, str] | None = None
) -> str:
    folder.mkdir()
    stored_tensors = {name: tensor for name, tensor in tensors.items() if name != "expected"}
    save_file(stored_tensors, folder / "model.safetensors", metadata=metadata)
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    with pytest.raises(WeightsError) as error:
        Weights.open(folder).tensor(f"{LAYER}.weight", (48, 128))
    return str(error.value)


def test_damaged_layers_of_bitsandbytes_are_refused(tmp_path: Path) -> None:
    valid_tensors = load_file(FOLDER / "bitsandbytes-nested-nf4.safetensors")
    state_name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
    invalid_states = {
        "text": b"{",
        "list": b"[]",
        "sizes": b'{"shape": [48, 128], "blocksize": 0}',
        "huge": b'{"shape": [48, 4000000000], "blocksize": 64}',
        "long": b" " * 20_000,
    }
    for name, text in invalid_states.items():
        damaged_tensors = valid_tensors | {state_name: torch.tensor(list(text)).to(torch.uint8)}
        assert "is damaged: it must have the shape" in read_error(
            damaged_tensors, "bitsandbytes", tmp_path / name
        )
    reshaped_tensors = valid_tensors | {
        state_name: torch.tensor(list(b'{"shape": [48, 64], "blocksize": 64}')).to(torch.uint8)
    }
    assert "has 3072 bytes for [48, 64]" in read_error(reshaped_tensors, "bitsandbytes", tmp_path / "shape")
    short_tensors = valid_tensors | {f"{LAYER}.weight.absmax": torch.zeros(5).to(torch.uint8)}
    assert "absmax is U8 [5] where bitsandbytes needs U8 [96]" in read_error(
        short_tensors, "bitsandbytes", tmp_path / "few"
    )


def make_class_metadata(class_name: str) -> dict[str, str]:
    """Return metadata with the class of the weight, as torchao writes it."""
    return {f"{LAYER}.weight": json.dumps({"_type": class_name})}


def test_unsupported_and_damaged_layers_of_torchao_are_refused(tmp_path: Path) -> None:
    valid_tensors = load_file(FOLDER / "torchao-int8.safetensors")
    tiled_tensors = valid_tensors | {f"{LAYER}._weight_qdata": torch.zeros(6, 1, 32, 4).int()}
    message = read_error(
        tiled_tensors, "torchao", tmp_path / "tiles", make_class_metadata("Int4TilePackedTo4dTensor")
    )
    assert "is Int4TilePackedTo4dTensor I32 [6, 1, 32, 4]: Int8Tensor and Float8Tensor and" in message
    invalid_tensors = valid_tensors | {f"{LAYER}._weight_qdata": torch.zeros(48, 16).int()}
    assert "_weight_qdata is I32 [48, 16]: Int8Tensor and" in read_error(
        invalid_tensors, "torchao", tmp_path / "words"
    )
    short_tensors = load_file(FOLDER / "torchao-w4-groups.safetensors")
    short_tensors[f"{LAYER}._weight_scale"] = torch.ones(48, 3).bfloat16()
    assert "_weight_scale has 3 groups for 128 inputs" in read_error(
        short_tensors, "torchao", tmp_path / "few"
    )
    large_tensors = load_file(FOLDER / "torchao-w4-groups.safetensors")
    large_tensors[f"{LAYER}._weight_qdata"][3, 5] = 9
    int4_metadata = {"_type": "IntxUnpackedToInt8Tensor", "_data": {"target_dtype": {"_data": "int4"}}}
    metadata = {f"{LAYER}.weight": json.dumps(int4_metadata)}
    message = read_error(large_tensors, "torchao", tmp_path / "big", metadata)
    assert "has integers from -8 to 9 and a smallest zero point of 0, which do not fit into 4 bits" in message
    packed_tensors = load_file(FOLDER / "torchao-q4z-packed.safetensors")
    packed_tensors[f"{LAYER}._weight_zero_point"] = torch.zeros(2, 48).to(torch.int8)
    message = read_error(packed_tensors, "torchao", tmp_path / "packed", make_class_metadata("Int4Tensor"))
    assert "_weight_zero_point is I8 [2, 48] where torchao needs F16 or BF16 or F32 [2, 48]" in message
    scaled_tensors = valid_tensors | {f"{LAYER}._weight_act_pre_scale": torch.ones(128)}
    assert "needs scaled activations" in read_error(scaled_tensors, "torchao", tmp_path / "scaled")


def test_zero_points_of_torchao_rows_are_applied(tmp_path: Path) -> None:
    tensors = load_file(FOLDER / "torchao-int8.safetensors")
    expected = tensors.pop("expected").float()
    zero_points = torch.randint(-9, 9, (48, 1)).to(torch.int8)
    tensors[f"{LAYER}._weight_zero_point"] = zero_points
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    weights = Weights.open(tmp_path)
    assert weights.stored_encoding(f"{LAYER}.weight") == "uint8"
    expected_integers = tensors[f"{LAYER}._weight_qdata"].float() - zero_points.float()
    weight = weights.tensor(f"{LAYER}.weight", (48, 128))
    assert torch.equal(weight, expected_integers * tensors[f"{LAYER}._weight_scale"].float())
    assert not torch.allclose(weight, expected)
