"""MXFP4 blocks: dequantization as in the definition and in transformers, reading, and refused tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.errors import WeightsError
from penstock.kernels import ENCODINGS
from penstock.weights import Weights
from penstock.weights.checkpoint import open_checkpoint
from penstock.weights.formats.mxfp4 import BLOCK, dequantize


def dequantize_element(nibble: int, scale: int) -> float:
    """Return the E2M1 element times the E8M0 scale (OCP Microscaling Formats 1.0, sections 5.3.3, 5.4.1)."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return (-magnitude if sign else magnitude) * 2.0 ** (scale - 127)


@given(st.lists(st.integers(0, 255), min_size=16, max_size=16), st.integers(0, 252))
def test_dequantized_blocks_equal_the_definition(block_bytes: list[int], scale: int) -> None:
    numbers = dequantize(torch.tensor([block_bytes]).byte(), torch.tensor([scale]).byte())
    assert numbers.dtype == torch.bfloat16
    expected = [
        dequantize_element(nibble, scale) for byte in block_bytes for nibble in (byte & 15, byte >> 4)
    ]
    assert numbers.tolist() == expected


def test_a_nan_scale_gives_nan() -> None:
    block_bytes = torch.arange(32).view(2, 16).byte()
    numbers = dequantize(block_bytes, torch.tensor([127, 255]).byte()).view(2, BLOCK)
    assert numbers[0].isfinite().all()
    assert numbers[1].isnan().all()


def test_dequantized_blocks_equal_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator).byte()
    scales = torch.randint(100, 140, (3, 10, 4), generator=generator).byte()
    expected = convert_moe_packed_tensors(blocks, scales)  # [N, in, out]
    assert torch.equal(dequantize(blocks, scales), expected.transpose(1, 2))
    assert not torch.equal(dequantize(blocks.flip(-1), scales), expected.transpose(1, 2))


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], method: str | None = "mxfp4") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {} if method is None else {"quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("method", ["mxfp4", None])
def test_expert_blocks_are_read_as_one_matrix_per_expert(method: str | None, tmp_path: Path) -> None:
    """The format is recognized even if ``config.json`` does not name it."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator).byte()
    scales = torch.randint(100, 140, (3, 10, 4), generator=generator).byte()
    tensors = {"a_blocks": blocks, "a_scales": scales, "b_blocks": blocks[0].clone(), "c": torch.zeros(2)}
    tensors["b_scales"] = scales[0].clone()
    weights = Weights.open(write_checkpoint(tmp_path, tensors, method))
    assert weights.names == ("a.0.weight", "a.1.weight", "a.2.weight", "b.weight", "c")
    for expert in range(3):
        matrix = weights.tensor(f"a.{expert}.weight", (10, 4 * BLOCK))
        assert torch.equal(matrix, dequantize(blocks[expert], scales[expert]))
        stored_encoding, rows = weights.read_linear(f"a.{expert}.weight", (10, 4 * BLOCK))
        assert stored_encoding == "mxfp4"
        assert torch.equal(ENCODINGS[stored_encoding].unpack(rows), matrix.float())
        weights.release(f"a.{expert}.weight")
    assert torch.equal(weights.tensor("b.weight", (10, 128)), dequantize(blocks[0], scales[0]))
    assert weights.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert weights.num_parameters == 4 * 10 * 128 + 2
    weights.tensor("c", (2,))
    weights.finish()


def test_other_tensors_with_mxfp4_names_are_not_read_as_mxfp4(tmp_path: Path) -> None:
    tensors = {"a_blocks": torch.zeros(64).byte(), "b_scales": torch.zeros(2), "c": torch.zeros(2).byte()}
    headers = open_checkpoint(write_checkpoint(tmp_path, tensors)).headers
    assert set(headers) == set(tensors)


def test_missing_scales_and_wrong_shapes_or_types_are_refused(tmp_path: Path) -> None:
    valid_tensors = {"a_blocks": torch.zeros(2, 3, 1, 16).byte(), "a_scales": torch.zeros(2, 3, 1).byte()}
    tensors_by_message = {
        "a_scales is missing": {"a_blocks": valid_tensors["a_blocks"]},
        "a_scales is F32 [2, 3, 1] where MXFP4 needs U8 [2, 3, 1]": valid_tensors
        | {"a_scales": torch.zeros(2, 3, 1)},
        "a_scales is U8 [2, 3] where": valid_tensors | {"a_scales": torch.zeros(2, 3).byte()},
        "a_blocks is [2, 3, 1, 8] where MXFP4 needs [2, 3, 1, 16]": valid_tensors
        | {"a_blocks": torch.zeros(2, 3, 1, 8).byte()},
    }
    for number, (message, tensors) in enumerate(tensors_by_message.items()):
        with pytest.raises(WeightsError, match=re.escape(message)):
            Weights.open(write_checkpoint(tmp_path / str(number), tensors))
