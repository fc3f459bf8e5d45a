"""Layers that the formats' libraries wrote (``tools/write_quantized_layers.py``): the weights are theirs."""

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
    "w4": "uint4",
    "w3": "uint4",
    "w8": "uint8",
    "w8a8": "int8",
    "fp8": "fp8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "int8": "int8",
    "nf4": None,
    "fp4": None,
    "int4": "uint4",
}
"""The encoding of a layer, by the last part of the file's name that is a key."""


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.safetensors")), ids=lambda file: file.stem)
def test_the_weight_is_that_of_the_library(file: Path, tmp_path: Path) -> None:
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    expected = tensors.pop("expected")
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    section = json.loads(metadata["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    weights, name = Weights.open(tmp_path), f"{LAYER}.weight"
    assert weights.names == (name,)
    found = weights.tensor(name, (48, 128)).float()
    digits = 2**-8 if expected.dtype == torch.bfloat16 else 1e-6  # the library rounds to bfloat16
    torch.testing.assert_close(found, expected.float(), rtol=digits, atol=1e-6)
    assert not torch.equal(found, found.roll(1, 1))
    kind = [ENCODINGS[part] for part in file.stem.split("-") if part in ENCODINGS][-1]
    if file.stem.endswith("fp8-block"):
        kind = None  # blocks of 64 inputs
    assert weights.stored_encoding(name) == kind
    weights.finish()


def refused(tensors: dict[str, torch.Tensor], method: str, folder: Path) -> str:
    folder.mkdir()
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "expected"}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    with pytest.raises(WeightsError) as error:
        Weights.open(folder).tensor(f"{LAYER}.weight", (48, 128))
    return str(error.value)


def test_damaged_layers_of_bitsandbytes_are_refused(tmp_path: Path) -> None:
    good = load_file(FOLDER / "bitsandbytes-nested-nf4.safetensors")
    state = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
    texts = {
        "text": b"{",
        "list": b"[]",
        "sizes": b'{"shape": [48, 128], "blocksize": 0}',
        "huge": b'{"shape": [48, 4000000000], "blocksize": 64}',
        "long": b" " * 20_000,
    }
    for name, text in texts.items():
        damaged = good | {state: torch.tensor(list(text)).to(torch.uint8)}
        assert "is damaged: it must have the shape" in refused(damaged, "bitsandbytes", tmp_path / name)
    other = good | {state: torch.tensor(list(b'{"shape": [48, 64], "blocksize": 64}')).to(torch.uint8)}
    assert "has 3072 bytes for [48, 64]" in refused(other, "bitsandbytes", tmp_path / "shape")
    few = good | {f"{LAYER}.weight.absmax": torch.zeros(5).to(torch.uint8)}
    assert "absmax is U8 [5] where bitsandbytes needs U8 [96]" in refused(
        few, "bitsandbytes", tmp_path / "few"
    )


def test_other_layers_of_torchao_are_refused(tmp_path: Path) -> None:
    good = load_file(FOLDER / "torchao-int8.safetensors")
    packed = good | {f"{LAYER}._weight_qdata": torch.zeros(48, 16).int()}
    message = refused(packed, "torchao", tmp_path / "packed")
    assert "is I32 [48, 16]: 8-bit integers and floats can be read" in message
    zeros = good | {f"{LAYER}._weight_zero_point": torch.ones(48, 1).to(torch.int8)}
    assert "has zero points: quantize the model with symmetric" in refused(
        zeros, "torchao", tmp_path / "zeros"
    )
