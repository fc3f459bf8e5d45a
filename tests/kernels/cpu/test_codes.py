"""Products with uint4, uint8, fp8 and block-encoded weights agree with their definition on every ISA."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels import encoding_named
from penstock.kernels.codes import group_codes, quantize_fp8, split_scales, unpack_codes
from penstock.kernels.cpu import library, variants
from penstock.kernels.cpu.linear import PANELS
from penstock.kernels.cpu.ops import CpuOps

VARIANTS = {ops.isa: ops for ops in variants()}
BLOCK_ENCODINGS = ["q4_k", "q5_k", "q6_k", "q4_1", "q5_1", "mxfp4", "nvfp4", "nf4", "fp4", "q4_z"]
ENCODINGS = ["uint4", "uint8", "fp8", *BLOCK_ENCODINGS]
SHAPES = [(64, 64), (70, 33), (1, 1), (130, 100), (65, 1540)]
"""Numbers of outputs and inputs.

They cover whole and partial panels, numbers of inputs that are no multiple of 2, 4, 32 or 128, and several
blocks of inputs.
"""


@pytest.fixture(params=VARIANTS or [pytest.param("none", marks=pytest.mark.skip("no kernels are built"))])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    torch.manual_seed(0)
    return VARIANTS[request.param]


def random_rows(encoding: str, out_features: int, in_features: int) -> dict[str, Tensor]:
    """Return random tensors of an encoding. No 8-bit float is NaN."""
    if encoding in BLOCK_ENCODINGS:
        return random_blocks(encoding, out_features, in_features)
    if encoding == "fp8":
        codes = torch.randint(0, 256, (out_features, in_features)).to(torch.uint8)
        codes[codes & 127 == 127] = 0x03  # replaces NaN by a subnormal number
        # The codes of the first 48 outputs have an exponent above 0. The kernels have a path for such codes.
        codes[:48][codes[:48] & 0x78 == 0] += 8
        return {"weight": codes, "scales": torch.rand(out_features, -(-in_features // 128)) / 100}
    num_groups, num_codes = -(-in_features // 32), 1 << int(encoding[4])
    return {
        "weight": torch.randint(0, num_codes, (out_features, in_features)).to(torch.uint8),
        "scales": torch.randn(out_features, num_groups).half(),
        "zeros": torch.randint(0, num_codes, (out_features, num_groups)).to(torch.uint8),
        "row_scales": torch.rand(out_features),
    }


def random_blocks(encoding: str, out_features: int, in_features: int) -> dict[str, Tensor]:
    """Return random tensors of a block encoding, with the types and shapes of packed tensors."""
    rows = encoding_named(encoding).pack(torch.randn(out_features, in_features))
    num_codes = 1 << int(rows["weight"].max()).bit_length()
    rows["weight"] = torch.randint(0, num_codes, (out_features, in_features)).to(torch.uint8)
    for name in ("scales", "minima"):
        if name in rows and not rows[name].is_floating_point():
            min_scale, max_scale = {"mxfp4": (120, 130), "nvfp4": (0, 127), "q6_k": (-128, 128)}.get(
                encoding, (0, 64)
            )
            rows[name] = torch.randint(min_scale, max_scale, rows[name].shape).to(rows[name].dtype)
    if "row_scales" in rows:
        rows["row_scales"] = torch.rand(out_features)
    return rows


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_agree_with_the_definition(ops: CpuOps, encoding: str, shape: tuple[int, int]) -> None:
    linear_encoding, rows, bias = (
        encoding_named(encoding),
        random_rows(encoding, *shape),
        torch.randn(shape[0]).bfloat16(),
    )
    packed_weight = ops.pack_quantized(rows, encoding, bias=bias)
    assert packed_weight.layout == PANELS
    # the rows are strided and unaligned
    x = torch.randn(33, shape[1] + 5).bfloat16()[:, 3 : 3 + shape[1]]
    expected = linear_encoding.multiply(x.float(), rows, bias.float())
    magnitude_sums = x.float().abs() @ linear_encoding.unpack(rows).abs().T + bias.float().abs()
    for num_rows in (1, 2, 3, 7, 33):
        y = ops.linear(x[:num_rows], packed_weight)
        error = (y.float() - expected[:num_rows]).abs()
        assert bool((error <= 2**-8 * expected[:num_rows].abs() + 2**-18 * magnitude_sums[:num_rows]).all())
        assert torch.equal(y[-1], ops.linear(x[num_rows - 1 : num_rows], packed_weight)[0])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_packed_panels_equal_the_definition(ops: CpuOps, encoding: str) -> None:
    rows = random_rows(encoding, 70, 300)
    layout = encoding_named(encoding).panels
    assert layout is not None
    expected = layout.to_panels(rows)
    packed_weight = ops.pack_quantized(rows, encoding)
    assert torch.equal(packed_weight.tensors["panels"], expected["panels"])
    assert packed_weight.tensors.keys() == expected.keys()
    weight = torch.randn(130, 100)
    float_packed = ops.pack_linear(weight, encoding)
    assert torch.equal(
        float_packed.tensors["panels"], layout.to_panels(encoding_named(encoding).pack(weight))["panels"]
    )


@pytest.mark.parametrize(
    ("scales", "strides"),
    [
        (torch.rand(100, 1).expand(100, 3), (0, 1)),
        (torch.rand(1, 3).expand(100, 3), (1, 0)),
        (torch.rand(100, 3), (64, 1)),
        (torch.ones(1, 1).expand(100, 3), (0, 1)),
    ],
    ids=["per output", "per group", "per output and group", "per tensor"],
)
def test_products_with_every_stride_of_fp8_scales_agree_with_the_definition(
    ops: CpuOps, scales: torch.Tensor, strides: tuple[int, int]
) -> None:
    rows = random_rows("fp8", 100, 300) | {"scales": scales.contiguous()}
    layout, linear_encoding = encoding_named("fp8").panels, encoding_named("fp8")
    assert layout is not None
    packed_weight = ops.pack_quantized(rows, "fp8")
    panels = packed_weight.tensors["panels"]
    assert tuple(panels[-64:].view(torch.int32)[:2].tolist()) == strides
    assert torch.equal(panels, layout.to_panels(rows)["panels"])
    assert torch.equal(layout.from_panels(packed_weight.tensors, 100, 300)["scales"], rows["scales"])
    # Rows of one tile, of two tiles, and of the path that widens weights to float32.
    for num_rows in (1, 7, 20):
        x = torch.randn(num_rows, 300).bfloat16()
        expected = linear_encoding.multiply(x.float(), rows, None)
        magnitude_sums = x.float().abs() @ linear_encoding.unpack(rows).abs().T
        error = (ops.linear(x, packed_weight).float() - expected).abs()
        assert bool((error <= 2**-8 * expected.abs() + 2**-18 * magnitude_sums).all())


def test_every_8_bit_float_is_decoded_exactly(ops: CpuOps) -> None:
    codes = torch.arange(256).to(torch.uint8)
    codes[codes & 127 == 127] = 0
    rows = {"weight": codes[:, None].contiguous(), "scales": torch.ones(256, 1)}
    y = ops.linear(torch.ones(1, 1).bfloat16(), ops.pack_quantized(rows, "fp8"))
    assert torch.equal(y[0].float(), codes.view(torch.float8_e4m3fn).float())


@pytest.fixture
def table_choice() -> Iterator[ctypes.c_int32]:
    """Yield the variable of the library that selects how 8-bit floats are decoded.

    0: never with tables; 1: with tables where they are faster; 2: always with tables. The fixture restores
    the value after the test.
    """
    table_variable = ctypes.c_int32.in_dll(ctypes.CDLL(str(library.PATH)), "penstock_fp8_tables")
    previous_value = table_variable.value
    yield table_variable
    table_variable.value = previous_value


@pytest.mark.skipif("avx512" not in VARIANTS, reason="needs AVX-512 with bfloat16")
@pytest.mark.parametrize("out_features", [1, 70, 256])
def test_decoding_8_bit_floats_with_tables_changes_no_bits(
    table_choice: ctypes.c_int32, out_features: int
) -> None:
    if not table_choice.value:
        pytest.skip("this CPU has no AVX-512 VBMI")
    torch.manual_seed(0)
    ops, rows = VARIANTS["avx512"], random_rows("fp8", out_features, 300)
    rows["weight"][:, :256] = torch.arange(256).to(torch.uint8)
    rows["weight"][rows["weight"] & 127 == 127] = 0x83
    packed_weight = ops.pack_quantized(rows, "fp8")
    x = torch.randn(33, 300).bfloat16()
    results = []
    for choice in (0, 1, 2):
        table_choice.value = choice
        results.append([ops.linear(x[:num_rows], packed_weight) for num_rows in (1, 2, 3, 7, 33)])
    for arithmetic_result, *table_results in zip(*results, strict=True):
        assert all(torch.equal(arithmetic_result, table_result) for table_result in table_results)


@pytest.mark.skipif("avx512" not in VARIANTS, reason="needs AVX-512 with bfloat16")
def test_every_8_bit_float_is_decoded_exactly_without_tables(table_choice: ctypes.c_int32) -> None:
    table_choice.value = 0
    test_every_8_bit_float_is_decoded_exactly(VARIANTS["avx512"])


@pytest.mark.parametrize("encoding", BLOCK_ENCODINGS)
def test_every_code_of_a_block_encoding_is_decoded(ops: CpuOps, encoding: str) -> None:
    """The weight has one input, and the activation is 1, so each output is a weight."""
    linear_encoding = encoding_named(encoding)
    rows = random_blocks(encoding, 256, 1)
    rows["weight"] = (torch.arange(256)[:, None] % (1 << linear_encoding.bits)).to(torch.uint8)
    if encoding in ("mxfp4", "nvfp4"):
        rows["scales"] = torch.arange(256)[:, None].to(torch.uint8)
        rows["weight"] = rows["weight"].flip(0).contiguous()
    expected = linear_encoding.unpack(rows)[:, 0]
    y = ops.linear(torch.ones(1, 1), ops.pack_quantized(rows, encoding))[0]
    # The kernel may overflow before it multiplies a product by the scale.
    is_comparable = expected.isfinite() & (expected.abs() < 1e38)
    assert int(is_comparable.sum()) > 200
    # The kernel rounds nf4 values to 16 bits. Subtracting a zero point of q4_z cancels leading bits.
    error = {"nf4": 0.51 / 32767, "q4_z": 2e-6}.get(encoding, 0.0) * float(rows["scales"].float().max())
    torch.testing.assert_close(y[is_comparable], expected[is_comparable], rtol=1e-6, atol=max(error, 1e-38))
    assert y[expected.isnan()].isnan().all()


@pytest.mark.parametrize("encoding", BLOCK_ENCODINGS)
def test_a_nan_in_a_block_affects_only_its_output(ops: CpuOps, encoding: str) -> None:
    weight = torch.randn(3, 300)
    weight[1, 290] = torch.nan
    y = ops.linear(torch.ones(2, 300), ops.pack_linear(weight, encoding))
    assert y.isnan().all(0).tolist() == [False, True, False]


def test_a_nan_code_affects_only_its_output_and_a_nan_weight_only_its_scale(ops: CpuOps) -> None:
    rows = random_rows("fp8", 3, 200)
    rows["weight"][1, 150] = 0x7F
    y = ops.linear(torch.ones(8, 200).bfloat16(), ops.pack_quantized(rows, "fp8"))
    assert y.isnan().all(0).tolist() == [False, True, False]
    weight = torch.randn(3, 200)
    weight[1, 150] = torch.nan
    assert quantize_fp8(weight)["scales"].isnan().tolist() == [[False, False], [False, True], [False, False]]


def test_split_scales_are_exact_for_large_and_small_scales() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        scales = (
            torch.randn(50, 4) * 10.0 ** torch.randint(-30 if dtype == torch.bfloat16 else -3, 3, (50, 1))
        ).to(dtype)
        scales[3] = 0
        float16_scales, row_scales = split_scales(scales)
        assert torch.equal(float16_scales.float() * row_scales[:, None], scales.float())


@pytest.mark.parametrize("group_size", [32, 96, 128, 320])
def test_group_codes_represent_the_same_weights_for_every_group_size(group_size: int) -> None:
    """The last group may be shorter than the other groups."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (5, 300)).to(torch.uint8)
    num_groups = -(-300 // group_size)
    scales, zeros = torch.rand(5, num_groups), torch.randint(0, 16, (5, num_groups))
    scales = scales.half().float()
    values_per_input = [
        values.repeat_interleave(group_size, 1)[:, :300] for values in (scales, zeros.float())
    ]
    result = unpack_codes(group_codes(codes, scales, zeros, group_size))
    assert torch.equal(result, (codes.float() - values_per_input[1]) * values_per_input[0])
