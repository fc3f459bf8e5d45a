"""Weights in panels: the documented position of each number, and the way back to rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_draws import num_examples
from torch import Tensor

from penstock.kernels import PackedLinear, encoding_named, pack_linear, unpack_linear
from penstock.kernels.cpu import variants
from penstock.kernels.cpu.linear import PANELS
from penstock.kernels.encodings._sizes import FP8_GROUP, GROUP, PANEL
from penstock.kernels.linear import ROWS, tensors_in_rows
from penstock.kernels.panels import PanelLayout

BLOCK_ENCODINGS = ("q4_k", "q5_k", "q6_k", "q4_1", "q5_1", "mxfp4", "nvfp4", "nf4", "fp4", "q4_z")
ENCODINGS = ("float32", "bfloat16", "int8", "int5", "int4", "uint8", "uint4", "fp8", *BLOCK_ENCODINGS)
SIZES = st.integers(1, 150)


def panel_layout(encoding: str) -> PanelLayout:
    layout = encoding_named(encoding).panels
    assert layout is not None
    return layout


def random_rows(encoding: str, out_features: int, in_features: int) -> dict[str, Tensor]:
    """Return random tensors of an encoding, with values that packing may never produce."""
    if encoding in BLOCK_ENCODINGS:
        rows = encoding_named(encoding).pack(torch.randn(out_features, in_features))
        rows["weight"] = torch.randint(0, 1 << encoding_named(encoding).bits, (out_features, in_features)).to(
            torch.uint8
        )
        return rows
    if encoding == "int8":
        weight = torch.randint(-128, 128, (out_features, in_features)).to(torch.int8)
        return {"weight": weight, "scales": torch.randn(out_features)}
    if encoding in ("int5", "int4"):
        limit = 1 << int(encoding[3]) - 1
        weight = torch.randint(-limit, limit, (out_features, in_features)).to(torch.int8)
        return {"weight": weight, "scales": torch.randn(out_features, -(-in_features // GROUP)).half()}
    if encoding in ("uint8", "uint4"):
        num_codes, num_groups = 1 << int(encoding[4]), -(-in_features // GROUP)
        return {
            "weight": torch.randint(0, num_codes, (out_features, in_features)).to(torch.uint8),
            "scales": torch.randn(out_features, num_groups).half(),
            "zeros": torch.randint(0, num_codes, (out_features, num_groups)).to(torch.uint8),
            "row_scales": torch.randn(out_features),
        }
    if encoding == "fp8":
        weight = (
            torch.randint(0, 127, (out_features, in_features))
            | torch.randint(0, 2, (out_features, in_features)) << 7
        )
        return {
            "weight": weight.to(torch.uint8),
            "scales": torch.randn(out_features, -(-in_features // FP8_GROUP)),
        }
    return {"weight": torch.randn(out_features, in_features).to(getattr(torch, encoding))}


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=num_examples(25))
@given(out_features=SIZES, in_features=SIZES, seed=st.integers(0, 9))
def test_panels_unpack_to_their_packed_rows(
    encoding: str, out_features: int, in_features: int, seed: int
) -> None:
    torch.manual_seed(seed)
    rows = random_rows(encoding, out_features, in_features)
    panels = panel_layout(encoding).to_panels(rows)
    unpacked_rows = panel_layout(encoding).from_panels(panels, out_features, in_features)
    assert unpacked_rows.keys() == rows.keys()
    for name, tensor in rows.items():
        assert unpacked_rows[name].dtype == tensor.dtype
        assert torch.equal(unpacked_rows[name], tensor)
        assert unpacked_rows[name].is_contiguous()
    assert all(tensor.is_contiguous() for tensor in panels.values())
    assert panels["panels"].shape == panel_layout(encoding).shape(out_features, in_features)
    assert panels["panels"].dtype == panel_layout(encoding).dtype.to_torch()
    assert sum(panel.nbytes for panel in panels.values()) == encoding_named(encoding).num_bytes(
        out_features, in_features
    )
    packed_weight = PackedLinear(encoding, panels, in_features, out_features, layout=PANELS)
    assert torch.equal(unpack_linear(packed_weight), encoding_named(encoding).unpack(rows))
    assert tensors_in_rows(packed_weight).keys() == rows.keys()


def check_weight_in_unit(
    units: Tensor, rows: dict[str, Tensor], encoding: str, column: int, weight_index: tuple[int, int]
) -> None:
    """Check the positions of a code, its scale, its minimum and its factors in the units of a panel."""
    (n, k), bits = weight_index, encoding_named(encoding).bits
    has_factors, inputs_per_scale = "factors" in rows, encoding_named(encoding).group_size or 0
    in_features = 256 if has_factors else max(inputs_per_scale, 32)
    unit = units[k // in_features]
    factor_bytes = 128 * sum(name in rows for name in ("factors", "min_factors"))
    if inputs_per_scale > 32:  # the unit has one float32 scale
        factor_bytes = 256
        assert unit[-256:].view(torch.float32)[column] == rows["scales"][n, k // inputs_per_scale]
    num_groups = unit[: len(unit) - factor_bytes].view(in_features // 32, -1)
    group, step, position = num_groups[k // 32 % len(num_groups)], k % 32 // 8, k % 8
    byte = int(group[256 * step + 4 * column + position % 4])
    code = byte >> 4 if position >= 4 else byte & 15
    if bits == 5:
        code |= (int(group[1024 + 4 * column + position % 4]) >> 2 * step + position // 4 & 1) << 4
    if bits == 6:
        word = int(group[1024 + 256 * (step // 2) + 4 * column + position % 4])
        code |= (word >> 2 * (2 * (step % 2) + position // 4) & 3) << 4
    assert code == rows["weight"][n, k]
    if inputs_per_scale > 32:
        return
    after_codes = group[256 * bits :]
    scale = rows["scales"]
    group_scales = after_codes[: 64 * scale.itemsize * 32 // inputs_per_scale].view(scale.dtype)
    assert group_scales[k % 32 // inputs_per_scale * 64 + column] == scale[n, k // inputs_per_scale]
    if "minima" in rows:
        minimum = rows["minima"]
        assert after_codes[-64 * minimum.itemsize :].view(minimum.dtype)[column] == minimum[n, k // 32]
    if has_factors:
        factors = unit[len(unit) - factor_bytes :].view(torch.float16)
        assert factors[column] == rows["factors"][n, k // 256]
        assert "min_factors" not in rows or factors[64 + column] == rows["min_factors"][n, k // 256]


@given(out_features=SIZES, in_features=SIZES, data=st.data())
def test_a_weight_lies_at_its_documented_position(
    out_features: int, in_features: int, data: st.DataObject
) -> None:
    n = data.draw(st.integers(0, out_features - 1))
    k = data.draw(st.integers(0, in_features - 1))
    panel, column = divmod(n, 64)
    for encoding in ENCODINGS:
        rows = random_rows(encoding, out_features, in_features)
        weight, panels = rows["weight"][n, k], panel_layout(encoding).to_panels(rows)["panels"]
        if encoding == "float32":
            assert panels[panel, k, column] == weight
        elif encoding == "bfloat16":
            assert panels[panel, k // 2, column, k % 2] == weight
        elif encoding == "int8":
            assert panels[panel, k // 4, column, k % 4] == int(weight) + 128
        elif encoding in BLOCK_ENCODINGS:
            check_weight_in_unit(panels[panel], rows, encoding, column, (n, k))
        elif encoding == "fp8":
            num_groups, byte = -(-in_features // 128), 8 * (k % 4 // 2) + 2 * (column % 4) + k % 2
            assert panels[panel * num_groups * 8192 + 256 * (k // 4) + 16 * (column // 4) + byte] == weight
            table = panels[-(-out_features // 64) * num_groups * 8192 :].view(-1, num_groups * 256 + 64)[
                panel
            ]
            group_stride, output_stride = table[-64:].view(torch.int32)[:2].tolist()
            scale = table[:-64].view(torch.float32)[k // 128 * group_stride + column * output_stride]
            assert scale == rows["scales"][n, k // 128]
        elif encoding in ("uint8", "uint4"):
            panel_bytes, step, position = panels[panel, k // 32], k % 32 // 8, k % 8
            if encoding == "uint8":
                assert panel_bytes[256 * (k % 32 // 4) + 4 * column + k % 4] == weight
            else:
                byte = int(panel_bytes[256 * step + 4 * column + position % 4])
                assert (byte >> 4 if position >= 4 else byte & 15) == weight
            assert panel_bytes[-192:-64].view(torch.float16)[column] == rows["scales"][n, k // 32]
            assert panel_bytes[-64:][column] == rows["zeros"][n, k // 32]
        else:
            group, step, position = k // 32, k % 32 // 8, k % 8
            panel_bytes = panels[panel, group]
            byte = int(panel_bytes[256 * step + 4 * column + position % 4])
            low_bits = byte >> 4 if position >= 4 else byte & 15
            if encoding == "int4":
                assert low_bits == int(weight) + 8
            else:
                fifth_bits = (
                    int(panel_bytes[1024 + 4 * column + position % 4]) >> 2 * step + position // 4 & 1
                )
                assert low_bits + 16 * fifth_bits == int(weight) + 16
            assert panel_bytes[-128:].view(torch.float16)[column] == rows["scales"][n, group]


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(out_features=SIZES, in_features=SIZES)
def test_padding_of_panels_is_zero(encoding: str, out_features: int, in_features: int) -> None:
    panels = panel_layout(encoding).to_panels(random_rows(encoding, out_features, in_features))
    multiple = {"float32": 1, "bfloat16": 2, "int8": 4}.get(encoding, 32)
    padded_outputs, padded_inputs = PANEL * -(-out_features // PANEL), -(-in_features // multiple) * multiple
    if "scales" in panels:  # padded outputs have no scales
        panels["scales"] = torch.ones(padded_outputs)
    weight = panel_layout(encoding).from_panels(panels, padded_outputs, padded_inputs)["weight"]
    assert not weight[out_features:].any()
    assert not weight[:, in_features:].any()


def test_float16_and_weights_packed_by_the_reference_are_stored_in_rows() -> None:
    assert encoding_named("float16").panels is None
    for ops in variants():
        assert ops.pack_linear(torch.randn(5, 7), "float16").layout == ROWS
    assert pack_linear(torch.randn(5, 7), "float32").layout == ROWS


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
@given(out_features=SIZES, in_features=SIZES)
def test_back_ends_pack_panels_as_defined(encoding: str, out_features: int, in_features: int) -> None:
    weight = torch.randn(out_features, in_features)
    expected_panels = panel_layout(encoding).to_panels(encoding_named(encoding).pack(weight))
    for ops in variants():
        packed_weight = ops.pack_linear(weight, encoding)
        assert packed_weight.layout == PANELS
        assert packed_weight.tensors.keys() == expected_panels.keys()
        assert all(
            torch.equal(packed_weight.tensors[name], tensor) for name, tensor in expected_panels.items()
        )
        assert all(tensor.data_ptr() % 64 == 0 for tensor in packed_weight.tensors.values())
