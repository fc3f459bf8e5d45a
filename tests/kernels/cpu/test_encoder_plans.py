"""Compiled encoder steps: attention without a KV cache, several library calls per step, refusals, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from penstock.kernels import Ops, cpu
from penstock.kernels.cpu.graphs import CpuGraphCompiler
from penstock.kernels.cpu.library import CoreContention
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.plan import CompiledPlan
from penstock.kernels.graph import GraphCache
from penstock.kernels.operations import UnrecordableStepError
from penstock.kernels.recording import record

variants = cpu.variants()
pytestmark = pytest.mark.skipif(not variants, reason="the C++ kernels are not built")
Step = Callable[[Ops, Mapping[str, Tensor]], list[Tensor]]


@pytest.fixture(params=variants, ids=lambda ops: ops.isa)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    torch.manual_seed(0)
    result: CpuOps = request.param
    return result


def double(ops: Ops, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    return [ops.scale(inputs["x"], 2.0)]


def random_encoder(ops: CpuOps, width: int, lengths: Sequence[int]) -> tuple[Step, dict[str, Tensor]]:
    """Return a step of three encoder attentions over sequences of these lengths, and its inputs."""
    qkv = ops.pack_linear(torch.randn(3 * width, width) / width**0.5, "float32")
    row_offsets = torch.tensor([0, *accumulate(lengths)]).int()
    blocks = ops.sequence_blocks(row_offsets)

    def step(ops: Ops, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        num_heads = ops.linear(inputs["x"], qkv).view(-1, 3, width // 16, 16)
        q, k, v = num_heads.unbind(1)
        shared_options = {"scale": 0.25, "blocks": blocks}
        full_result = ops.encoder_attention(q, k, v, inputs["offsets"], **shared_options)
        windowed_result = ops.encoder_attention(
            full_result, k, v, inputs["offsets"], window=3, **shared_options
        )
        causal_result = ops.encoder_attention(
            windowed_result, k, v, inputs["offsets"], is_causal=True, **shared_options
        )
        return [ops.add(inputs["x"], causal_result.flatten(1))]

    return step, {"x": torch.randn(sum(lengths), width), "offsets": row_offsets}


@pytest.mark.parametrize(("width", "lengths"), [(32, [5, 70, 1]), (512, [200, 64])])
def test_compiled_encoder_attention_is_bit_equal_to_eager(
    ops: CpuOps, width: int, lengths: list[int]
) -> None:
    step, inputs = random_encoder(ops, width, lengths)
    graphs = GraphCache(CpuGraphCompiler(ops), pads_columns=False)
    for replay in range(4):
        inputs["x"] = torch.randn(sum(lengths), width)
        results = graphs.run("a", inputs, step)
        assert (results is None) == (replay == 0)
        if results is not None:
            assert torch.equal(results[0], step(ops, inputs)[0])
    assert graphs.status == "compiled: 8 kernels in one call"


def test_a_long_step_is_split_into_several_calls(ops: CpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only operations with more than 64 rows count for the split."""
    monkeypatch.setattr("penstock.kernels.cpu.plan._MULTIPLICATIONS_PER_CALL", 1 << 20)
    step, inputs = random_encoder(ops, 64, [100])
    graphs = GraphCache(CpuGraphCompiler(ops), pads_columns=False)
    for _ in range(3):
        inputs["x"] = torch.randn(100, 64)
        results = graphs.run("a", inputs, step)
    assert results is not None
    assert torch.equal(results[0], step(ops, inputs)[0])
    assert graphs.status == "compiled: 8 kernels in 5 calls"
    small_step, small_inputs = random_encoder(ops, 64, [50])
    for _ in range(2):
        graphs.run("b", small_inputs, small_step)
    assert graphs.status == "compiled: 8 kernels in one call"


def test_a_plan_without_enough_scratch_memory_is_refused(ops: CpuOps) -> None:
    step, inputs = random_encoder(ops, 32, [5])
    plan = record(ops, inputs, lambda recording: step(recording, inputs))
    arena = torch.empty(plan.arena_bytes, dtype=torch.uint8)
    with pytest.raises(UnrecordableStepError, match="needs more scratch memory than the plan has"):
        CompiledPlan(plan, ops, inputs, arena, CoreContention())


def test_attention_without_given_blocks_or_with_a_bias_is_not_recorded(ops: CpuOps) -> None:
    """A recorded step would use the sequence lengths and the bias of the recording in each replay."""
    x, row_offsets = torch.randn(5, 2, 16), torch.tensor([0, 5]).int()
    graphs = GraphCache(CpuGraphCompiler(ops), pads_columns=False)
    for key, options, reason in (
        ("lengths", {}, "an operation needs the lengths of the sequences"),
        (
            "bias",
            {"bias": torch.randn(2, 9), "blocks": ops.sequence_blocks(row_offsets)},
            "a bias of encoder",
        ),
    ):
        for _ in range(2):
            assert (
                graphs.run(
                    key,
                    {"x": x, "offsets": row_offsets},
                    lambda ops, inputs, options=options: [  # type: ignore[misc]
                        ops.encoder_attention(
                            inputs["x"], inputs["x"], inputs["x"], inputs["offsets"], scale=1.0, **options
                        )
                    ],
                )
                is None
            )
        assert reason in str(graphs.status)


def test_the_memory_of_graphs_is_bounded(ops: CpuOps) -> None:
    graphs = GraphCache(CpuGraphCompiler(ops), max_bytes=600_000)
    for num_rows in (100, 200, 300, 400, 100):
        for _ in range(2):
            graphs.run(num_rows, {"x": torch.ones(num_rows, 128)}, double)
        assert graphs.num_bytes <= 600_000
        assert graphs.num_graphs
    assert graphs.run(1000, {"x": torch.ones(1000, 128)}, double) is None
    results = graphs.run(1000, {"x": torch.ones(1000, 128)}, double)
    assert results is not None
    assert torch.equal(results[0], torch.full((1000, 128), 2.0))
    assert graphs.run(1000, {"x": torch.ones(1000, 128)}, double) is None
    assert "exceeds the limit of 600,000 bytes" in str(graphs.status)
