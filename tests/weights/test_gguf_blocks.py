"""Dequantization of GGUF blocks gives the numbers of the gguf package."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from penstock.errors import MissingDependencyError
from penstock.weights import gguf_blocks
from penstock.weights.gguf import BLOCK_SIZES
from penstock.weights.gguf_blocks import READERS, dequantize
from penstock.weights.gguf_names import PACKAGE_BLOCKS, READABLE_BLOCKS


@pytest.mark.parametrize("name", [*READABLE_BLOCKS, *PACKAGE_BLOCKS])
def test_dequantized_random_blocks_equal_those_of_the_gguf_package(name: str) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (400, BLOCK_SIZES[name]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, GGMLQuantizationType[name])
    numbers = dequantize(torch.from_numpy(blocks), name)
    assert numbers.dtype is torch.float32
    np.testing.assert_array_equal(numbers.numpy(), expected)  # assert_array_equal treats NaN as equal to NaN


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_numbers_are_restored_approximately(name: str) -> None:
    numbers = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(numbers, GGMLQuantizationType[name])
    restored_numbers = (
        dequantize(torch.from_numpy(blocks).view(-1, BLOCK_SIZES[name]), name).view(8, 64).numpy()
    )
    max_error = {"4": 0.25, "5": 0.13, "8": 0.02}[name[1]]
    assert 0 < np.abs(restored_numbers - numbers).max() < max_error * np.abs(numbers).max()


def test_readable_block_types_are_the_types_with_a_reader() -> None:
    assert set(READABLE_BLOCKS) == set(READERS)


def test_a_missing_gguf_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        MissingDependencyError, match=r"reading IQ2_XXS blocks needs gguf: pip install .*\[gguf\]"
    ):
        dequantize(torch.zeros(1, BLOCK_SIZES["IQ2_XXS"]).byte(), "IQ2_XXS")


def test_chunked_dequantization_gives_equal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (23, 34), dtype=np.uint8))
    expected = dequantize(blocks, "Q8_0")
    monkeypatch.setattr(gguf_blocks, "_BLOCKS_PER_CHUNK", 5)
    assert torch.equal(dequantize(blocks, "Q8_0").nan_to_num(), expected.nan_to_num())
