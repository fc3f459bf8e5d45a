"""Weights in nibbles: two in a byte, and back."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import ENCODINGS, encoding_named
from penstock.kernels.nibbles import fits_nibbles, from_nibbles, signed_offset, to_nibbles


@pytest.mark.parametrize("name", [name for name, kind in ENCODINGS.items() if fits_nibbles(kind)])
@pytest.mark.parametrize("inputs", [1, 32, 33, 64, 100])
def test_nibbles_are_exact(name: str, inputs: int) -> None:
    kind = encoding_named(name)
    rows = kind.pack(torch.randn(5, inputs, generator=torch.Generator().manual_seed(0)))
    stored = to_nibbles(rows, kind)
    assert stored["weight"].shape == (5, -(-inputs // 64) * 32)
    assert stored["weight"].dtype == torch.uint8
    again = from_nibbles(stored, kind, inputs)
    assert again.keys() == rows.keys()
    for key, tensor in rows.items():
        assert torch.equal(again[key], tensor)
        assert again[key].dtype == tensor.dtype


def test_the_place_of_an_input() -> None:
    kind = encoding_named("int4")
    weight = torch.zeros(1, 128, dtype=torch.int8)
    weight[0, 64 + 32 + 5], weight[0, 7] = -8, 7
    stored = to_nibbles({"weight": weight}, kind)["weight"][0].tolist()
    assert stored[32 + 5] == 0x08
    assert stored[7] == 0x8F
    assert set(stored) == {0x88, 0x08, 0x8F}


def test_which_encodings_fit() -> None:
    assert {name for name, kind in ENCODINGS.items() if fits_nibbles(kind)} >= {"int4", "uint4"}
    assert not any(fits_nibbles(encoding_named(name)) for name in ("int8", "int5", "fp8", "bfloat16"))
    assert [signed_offset(encoding_named(name)) for name in ("int4", "uint4")] == [8, 0]
