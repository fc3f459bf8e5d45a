"""MXFP4 blocks against the format's definition and against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.errors import WeightsError
from penstock.weights import Weights
from penstock.weights.mxfp4 import BLOCK, dequantized, dequantized_shape, is_scales
from penstock.weights.safetensors import read_checkpoint_headers


def by_definition(nibble: int, scale: int) -> float:
    """E2M1 times E8M0, bit by bit (OCP Microscaling Formats 1.0, 5.3.3 and 5.4.1)."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return (-magnitude if sign else magnitude) * 2.0 ** (scale - 127)


@given(st.lists(st.integers(0, 255), min_size=16, max_size=16), st.integers(0, 252))
def test_a_block_is_what_the_format_says(content: list[int], scale: int) -> None:
    numbers = dequantized(torch.tensor([content]).byte(), torch.tensor([scale]).byte())
    assert numbers.dtype == torch.bfloat16
    expected = [by_definition(nibble, scale) for byte in content for nibble in (byte & 15, byte >> 4)]
    assert numbers.tolist() == expected


def test_a_scale_that_is_no_number() -> None:
    content = torch.arange(32).view(2, 16).byte()
    numbers = dequantized(content, torch.tensor([127, 255]).byte()).view(2, BLOCK)
    assert numbers[0].isfinite().all()
    assert numbers[1].isnan().all()


def test_blocks_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator).byte()
    scales = torch.randint(100, 140, (3, 10, 4), generator=generator).byte()
    theirs = convert_moe_packed_tensors(blocks, scales)  # [N, in, out]
    assert torch.equal(dequantized(blocks, scales), theirs.transpose(1, 2))
    assert not torch.equal(dequantized(blocks.flip(-1), scales), theirs.transpose(1, 2))


def test_names_and_shapes(tmp_path: Path) -> None:
    assert dequantized_shape("a.down_proj_blocks", (5, 64, 2, 16)) == (5, 64, 64)
    assert dequantized_shape("a.down_proj", (5, 64, 2, 16)) is None
    assert dequantized_shape("a.down_proj_blocks", (5, 64, 2, 8)) is None
    tensors = {"a_scales": torch.zeros(2).byte(), "b_scales": torch.zeros(2), "c": torch.zeros(2).byte()}
    save_file(tensors, tmp_path / "model.safetensors")
    headers = read_checkpoint_headers(tmp_path)
    assert [name for name in headers if is_scales(name, headers[name])] == ["a_scales"]


def test_bytes_are_read_as_they_are(tmp_path: Path) -> None:
    content = torch.arange(12).view(3, 4).byte()
    save_file({"a": content, "b": torch.zeros(2), "c": torch.zeros(5).byte()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    weights = Weights.open(tmp_path)
    assert torch.equal(weights.bytes_tensor("a", (3, 4)), content)
    for name, shape in (("b", (2,)), ("c", (6,)), ("d", (1, 2))):
        assert torch.equal(weights.bytes_tensor(name, shape), torch.zeros(shape).byte())
    with pytest.raises(WeightsError) as caught:
        weights.finish()
    message = str(caught.value)
    assert "1 missing: d" in message
    assert "b is of type F32 where the model needs bytes, U8" in message
    assert "c is [5] where the model needs [6]" in message
