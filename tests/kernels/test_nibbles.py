"""The layout `NIBBLES`: packing two 4-bit weights per byte, and unpacking them."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import ENCODINGS, encoding_named
from penstock.kernels.nibbles import fits_nibbles, from_nibbles, signed_offset, to_nibbles


@pytest.mark.parametrize(
    "encoding_name",
    [encoding_name for encoding_name, encoding in ENCODINGS.items() if fits_nibbles(encoding)],
)
@pytest.mark.parametrize("in_features", [1, 32, 33, 64, 100])
def test_packing_to_nibbles_is_lossless(encoding_name: str, in_features: int) -> None:
    encoding = encoding_named(encoding_name)
    rows = encoding.pack(torch.randn(5, in_features, generator=torch.Generator().manual_seed(0)))
    nibbles = to_nibbles(rows, encoding)
    assert nibbles["weight"].shape == (5, -(-in_features // 64) * 32)
    assert nibbles["weight"].dtype == torch.uint8
    unpacked = from_nibbles(nibbles, encoding, in_features)
    assert unpacked.keys() == rows.keys()
    for key, tensor in rows.items():
        assert torch.equal(unpacked[key], tensor)
        assert unpacked[key].dtype == tensor.dtype


def test_inputs_are_in_the_documented_nibbles() -> None:
    encoding = encoding_named("int4")
    weight = torch.zeros(1, 128, dtype=torch.int8)
    weight[0, 64 + 32 + 5], weight[0, 7] = -8, 7
    nibbles = to_nibbles({"weight": weight}, encoding)["weight"][0].tolist()
    assert nibbles[32 + 5] == 0x08
    assert nibbles[7] == 0x8F
    assert set(nibbles) == {0x88, 0x08, 0x8F}


def test_int4_and_uint4_fit_in_nibbles_and_have_the_offsets_8_and_0() -> None:
    assert {name for name, encoding in ENCODINGS.items() if fits_nibbles(encoding)} >= {"int4", "uint4"}
    assert not any(fits_nibbles(encoding_named(name)) for name in ("int8", "int5", "fp8", "bfloat16"))
    assert [signed_offset(encoding_named(name)) for name in ("int4", "uint4")] == [8, 0]
