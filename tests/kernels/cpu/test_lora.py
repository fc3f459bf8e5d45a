"""Adapters in the CPU kernels: the bits of a row do not depend on threads, other rows or recording."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from penstock.kernels import LinearSlice, LoRAInputs, Ops, PackedLinear, cpu
from penstock.kernels.cpu.library import CoreContention
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.plan import CompiledPlan
from penstock.kernels.operations import UnrecordableStepError
from penstock.kernels.recording import record
from penstock.kernels.reference import ReferenceOps

variants = cpu.variants()
pytestmark = pytest.mark.skipif(not variants, reason="the C++ kernels are not built")
NUM_ADAPTERS = 5
SLICES = (LinearSlice("q", 0, 200), LinearSlice("k", 200, 240), LinearSlice("v", 240, 301))


@pytest.fixture(params=variants, ids=lambda ops: ops.isa)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    torch.manual_seed(0)
    result: CpuOps = request.param
    return result


@pytest.fixture(params=[2, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    previous_num_threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(previous_num_threads)


def empty_inputs(in_features: int, rank: int, dtype: torch.dtype, names: str = "qv") -> LoRAInputs:
    """Return LoRA inputs with memory for adapters on some slices.

    All ranks are 0. Values beyond a rank are NaN.
    """
    matrices, ranks = {}, {}
    for linear_slice in SLICES:
        if linear_slice.name in names:
            down = torch.full((NUM_ADAPTERS, rank, in_features), torch.nan, dtype=dtype)
            up = torch.full(
                (NUM_ADAPTERS, rank, linear_slice.stop - linear_slice.start), torch.nan, dtype=dtype
            )
            matrices[linear_slice.name] = (down, up.transpose(1, 2))
            ranks[linear_slice.name] = torch.zeros(NUM_ADAPTERS, dtype=torch.int64)
    return LoRAInputs(torch.empty(0, dtype=torch.int64), matrices, ranks)


def fill_adapter(lora: LoRAInputs, adapter: int, ranks: Mapping[str, int]) -> None:
    """Replace the matrices of an adapter by random ones of the given ranks, in place."""
    for name, (down, up) in lora.matrices.items():
        rank = ranks.get(name, 0)
        down[adapter], up[adapter] = torch.nan, torch.nan
        down[adapter, :rank] = torch.randn(rank, down.shape[2]).to(down.dtype) / down.shape[2] ** 0.5
        up[adapter, :, :rank] = torch.randn(up.shape[1], rank).to(up.dtype)
        lora.ranks[name][adapter] = rank


def random_inputs(in_features: int, rank: int, dtype: torch.dtype) -> LoRAInputs:
    lora = empty_inputs(in_features, rank, dtype)
    for adapter, ranks in enumerate([(rank, rank), (1, rank), (rank // 2, 3), (0, 7), (rank - 1, 0)]):
        fill_adapter(lora, adapter, dict(zip("qv", ranks, strict=True)))
    return lora


def select_adapters(lora: LoRAInputs, rows: Tensor) -> LoRAInputs:
    return LoRAInputs(rows, lora.matrices, lora.ranks)


@pytest.mark.matrix(strength=1, times=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("in_features", "rank"), [(20, 12), (700, 64), (1500, 16)])
def test_rows_of_a_batch_equal_single_rows(
    ops: CpuOps, dtype: torch.dtype, in_features: int, rank: int, num_threads: int
) -> None:
    """The weight of the layer is zero, so that the results are only the products of the adapters.

    The sizes cover the three ways to divide work among threads: all work on one thread, few rows by ranks and
    outputs, and many rows by tiles of rows.
    """
    zero_layer = ops.pack_linear(
        torch.zeros(301, in_features), str(dtype).removeprefix("torch."), slices=SLICES
    )
    lora, x = (
        random_inputs(in_features, rank, dtype),
        torch.randn(90, 2 * in_features).to(dtype)[:, :in_features],
    )
    for adapter in (-1, 0, 3):
        adapters = torch.full((90,), adapter)
        torch.set_num_threads(1)
        single_rows = [
            ops.linear(x[i : i + 1], zero_layer, lora=select_adapters(lora, adapters[i : i + 1]))
            for i in range(90)
        ]
        single_result = torch.cat(single_rows)
        torch.set_num_threads(num_threads)
        assert not single_result.isnan().any()
        for num_rows in (2, 3, 8, 47, 90):
            assert torch.equal(
                ops.linear(x[:num_rows], zero_layer, lora=select_adapters(lora, adapters[:num_rows])),
                single_result[:num_rows],
            )
        mixed_adapters = torch.randint(-1, NUM_ADAPTERS, (90,))
        mixed_adapters[::7] = adapter
        for num_rows in (1, 8, 20, 90):
            actual = ops.linear(
                x[:num_rows], zero_layer, lora=select_adapters(lora, mixed_adapters[:num_rows])
            )
            is_selected = mixed_adapters[:num_rows] == adapter
            assert torch.equal(actual[is_selected], single_result[:num_rows][is_selected])


def compile_layer(
    ops: CpuOps, packed: PackedLinear, lora: LoRAInputs, x: Tensor, rows: Tensor, selected_positions: Tensor
) -> CompiledPlan:
    step_inputs = {"x": x.clone(), "rows": rows.clone(), "selected_positions": selected_positions.clone()}
    plan = record(ops, step_inputs, lambda recording: step(recording, packed, lora, step_inputs))
    return CompiledPlan(
        plan, ops, step_inputs, torch.empty(plan.arena_bytes, dtype=torch.uint8), CoreContention()
    )


def step(ops: Ops, packed: PackedLinear, lora: LoRAInputs, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Apply a layer to all rows, and to the rows that `take_rows` selects together with their adapters."""
    selected_rows = ops.take_rows(inputs["rows"][:, None], inputs["selected_positions"])[:, 0]
    selected_inputs = ops.take_rows(inputs["x"], inputs["selected_positions"])
    return [
        ops.linear(inputs["x"], packed, lora=select_adapters(lora, inputs["rows"])),
        ops.linear(selected_inputs, packed, lora=select_adapters(lora, selected_rows)),
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int5", "int4"])
@pytest.mark.parametrize(("in_features", "num_rows"), [(33, 1), (33, 6), (700, 1), (700, 8), (700, 60)])
def test_a_recorded_layer_applies_the_current_adapters(
    ops: CpuOps, encoding: str, in_features: int, num_rows: int, num_threads: int
) -> None:
    """Between replays, adapters with other ranks replace some of the adapters."""
    packed_weight = ops.pack_linear(torch.randn(301, in_features) / in_features**0.5, encoding, slices=SLICES)
    dtype = torch.float32 if encoding == "float32" else torch.bfloat16
    lora, equals_base_layer = empty_inputs(in_features, 64, dtype), []
    example_inputs = torch.randn(num_rows, in_features).to(dtype)
    selected_positions = torch.arange(num_rows)[: (num_rows + 1) // 2]
    plan = compile_layer(
        ops, packed_weight, lora, example_inputs, torch.full((num_rows,), -1), selected_positions
    )
    assert len(plan) == 6  # two row selections, two layers and their adapters
    for round_number in range(6):
        for adapter in range(round_number % 2, NUM_ADAPTERS, 2):
            fill_adapter(
                lora, adapter, {"q": (16 * round_number + adapter) % 65, "v": (37 * round_number + 5) % 65}
            )
        inputs = {
            "x": torch.randn(num_rows, in_features).to(dtype),
            "rows": torch.randint(-1 if round_number else NUM_ADAPTERS - 1, NUM_ADAPTERS, (num_rows,)),
            "selected_positions": torch.randperm(num_rows)[: len(selected_positions)],
        }
        actual = plan.replay(list(inputs.values()))
        torch.set_num_threads(1)
        expected = step(ops, packed_weight, lora, inputs)
        torch.set_num_threads(num_threads)
        assert not any(tensor.isnan().any() for tensor in actual)
        assert all(torch.equal(actual, reference) for actual, reference in zip(actual, expected, strict=True))
        equals_base_layer.append(torch.equal(actual[0], ops.linear(inputs["x"], packed_weight)))
    assert not all(equals_base_layer), "the adapters must change the results"


def test_a_layer_recorded_on_the_reference_replays_with_other_rows() -> None:
    reference = ReferenceOps()
    packed_weight = reference.pack_linear(torch.randn(301, 20), "float32", slices=SLICES)
    lora = random_inputs(20, 12, torch.float32)
    inputs = {
        "x": torch.randn(4, 20),
        "rows": torch.tensor([0, -1, 2, 0]),
        "selected_positions": torch.tensor([2, 3]),
    }
    plan = record(reference, inputs, lambda recording: step(recording, packed_weight, lora, inputs))
    other_inputs = {
        "x": torch.randn(4, 20),
        "rows": torch.tensor([-1, 4, 1, 3]),
        "selected_positions": torch.tensor([1, 0]),
    }
    fill_adapter(lora, 1, {"q": 5, "v": 2})
    expected = step(reference, packed_weight, lora, other_inputs)
    assert all(
        torch.equal(replayed_result, eager_result)
        for replayed_result, eager_result in zip(plan.replay(reference, other_inputs), expected, strict=True)
    )


def test_a_layer_without_adapters_records_no_adapter_kernels(ops: CpuOps) -> None:
    packed_weight = ops.pack_linear(torch.randn(301, 20), "float32", slices=SLICES)
    no_adapters = empty_inputs(20, 12, torch.float32, names="")
    plan = compile_layer(
        ops, packed_weight, no_adapters, torch.randn(3, 20), torch.tensor([0, 1, -1]), torch.tensor([1])
    )
    assert len(plan) == 4


def test_adapter_matrices_in_an_unsupported_layout_are_not_compiled(ops: CpuOps) -> None:
    """Only the reference kernels read contiguous up matrices, and compiled steps cannot call them."""
    packed_weight = ops.pack_linear(torch.randn(301, 20), "float32", slices=SLICES)
    lora = random_inputs(20, 12, torch.float32)
    matrices = {name: (down, up.contiguous()) for name, (down, up) in lora.matrices.items()}
    row_major_lora = LoRAInputs(lora.rows, matrices, lora.ranks)
    with pytest.raises(UnrecordableStepError, match="linear with adapters has no kernel"):
        compile_layer(
            ops, packed_weight, row_major_lora, torch.randn(2, 20), torch.tensor([0, 1]), torch.tensor([1])
        )
