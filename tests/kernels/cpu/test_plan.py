"""Compiled steps of the CPU back end: results, conditions for compiling, and several steps in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels import (
    XIELU,
    ClampedSwiGLU,
    LayerKV,
    Ops,
    PackedExperts,
    SamplingInputs,
    cpu,
    encoding_named,
)
from penstock.kernels.cpu.graphs import CpuGraphCompiler
from penstock.kernels.cpu.library import CoreContention
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.plan import CompiledPlan
from penstock.kernels.graph import GraphCache
from penstock.kernels.operations import UnrecordableStepError
from penstock.kernels.recording import Plan, record

variants = cpu.variants()
pytestmark = pytest.mark.skipif(not variants, reason="the C++ kernels are not built")
Step = Callable[[Ops, Mapping[str, Tensor]], list[Tensor]]


@pytest.fixture(params=variants, ids=lambda ops: ops.isa)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    torch.manual_seed(0)
    ops: CpuOps = request.param
    return ops


def compile_step(ops: CpuOps, inputs: Mapping[str, Tensor], step: Step) -> tuple[CompiledPlan, Plan]:
    """Record and compile a step on copies of the inputs, which the compiled step owns."""
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    plan = record(ops, copies, lambda recording: step(recording, copies))
    return CompiledPlan(
        plan, ops, copies, torch.empty(plan.arena_bytes, dtype=torch.uint8), CoreContention()
    ), plan


def step_with_many_operations(ops: CpuOps, encoding: str, width: int) -> Step:
    """Return a step with most of the operations that have a C++ kernel."""
    packed_weight = ops.pack_linear(torch.randn(4 * width, width) / width**0.5, encoding)
    down_weight = ops.pack_linear(torch.randn(width, 2 * width) / width**0.5, encoding)
    dtype = encoding_named(encoding).compute_dtype.to_torch()
    gate_ups = tuple(ops.pack_linear(torch.randn(96, width) / width**0.5, encoding) for _ in range(6))
    downs = tuple(ops.pack_linear(torch.randn(width, 48) / 7, encoding) for _ in range(6))
    experts = PackedExperts(gate_ups, downs)
    table, weight, bias = torch.randn(50, width).to(dtype), torch.randn(width), torch.randn(width)
    angles = torch.randn(100, 8)
    head_weight, head_bias = torch.randn(2, 4, 16)
    cache, sinks = torch.zeros(2, 9, 2, 16, 16).to(dtype), torch.randn(4).bfloat16()

    def step(ops: Ops, step_inputs: Mapping[str, Tensor]) -> list[Tensor]:
        kv = LayerKV(cache, step_inputs["tables"], step_inputs["slots"])
        rows = ops.rope_rows(step_inputs["positions"], angles.cos(), angles.sin())
        x = ops.scale(ops.embedding(step_inputs["tokens"], table), 3.0)
        normalized, x = ops.add_rms_norm(ops.rms_norm(x, weight, 1e-5), x, weight, 1e-5)
        x = ops.clamp(ops.add(ops.layer_norm(normalized, weight, bias, 1e-5), x), -9.0, 8.0)
        num_heads = ops.linear(x, packed_weight)[:, :128].view(-1, 8, 16)
        q = ops.layer_norm(num_heads[:, :4], head_weight, head_bias, 1e-5)
        q, k = ops.rotary(q, num_heads[:, 4:6], *rows)
        q, k = ops.rotary(q, k, *rows, is_interleaved=True)
        ops.store_kv(k, num_heads[:, 6:], kv)
        attended = ops.attention(
            q, kv, step_inputs["offsets"], step_inputs["lengths"], scale=0.25, sinks=sinks
        )
        gates = ops.linear(
            ops.put_rows(x, step_inputs["last"], ops.take_rows(x, step_inputs["last"])), packed_weight
        )
        gate_output = ops.gated_activation(gates, "silu")
        clamped_output = ops.clamped_swiglu(gates, ClampedSwiGLU(1.7, 7.0))
        gate_output = ops.add(gate_output, ops.xielu(clamped_output, XIELU(0.8, 1.3, 0.5, -1e-6)))
        y = ops.linear(ops.add(gate_output, clamped_output), down_weight)
        y = ops.linear(ops.activated_linear(y, packed_weight, "gelu")[:, : 2 * width], down_weight)
        topk_weights, topk_ids = ops.route(ops.soft_cap(ops.activation(y, "gelu"), 5.0)[:, :6], 3, "chosen")
        return [
            y,
            attended,
            ops.experts(x, experts, topk_weights, topk_ids, "silu"),
            topk_weights,
            topk_ids,
            k,
        ]

    return step


def make_step_inputs(lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return the inputs of a step with one row and four blocks per sequence."""
    last_positions = torch.tensor(lengths) - 1
    block_tables = 1 + torch.randperm(8)[: 4 * len(lengths)].view(-1, 4)
    return {
        "tokens": torch.randint(0, 50, (len(lengths),)),
        "positions": last_positions,
        "tables": block_tables.int(),
        "slots": block_tables[torch.arange(len(lengths)), last_positions // 16] * 16 + last_positions % 16,
        "offsets": torch.arange(len(lengths) + 1).int(),
        "lengths": torch.tensor(lengths).int(),
        "last": torch.tensor([0]),
    }


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int5", "int4", "uint4", "fp8"])
@pytest.mark.parametrize("width", [32, 640])  # the work of the wider step is divided among the threads
def test_a_compiled_step_is_bit_equal_to_its_operations(ops: CpuOps, encoding: str, width: int) -> None:
    step = step_with_many_operations(ops, encoding, width)
    plan, recorded_plan = compile_step(ops, make_step_inputs([3, 20]), step)
    assert len(plan) == len(recorded_plan.records) + 1  # the lookup of the rotary tables has two kernels
    for lengths in ([17, 16], [33, 1], [64, 50]):
        step_inputs = make_step_inputs(lengths)
        replayed_results = plan.replay(list(step_inputs.values()))
        for actual, eager_result in zip(replayed_results, step(ops, step_inputs), strict=True):
            assert torch.equal(actual, eager_result)


def test_results_are_not_overwritten_by_the_next_replay(ops: CpuOps) -> None:
    step = step_with_many_operations(ops, "float32", 32)
    plan, _ = compile_step(ops, make_step_inputs([3, 20]), step)
    first_results = plan.replay(list(make_step_inputs([5, 9]).values()))
    copies = [result.clone() for result in first_results]
    second_results = plan.replay(list(make_step_inputs([50, 60]).values()))
    assert all(torch.equal(result, copy) for result, copy in zip(first_results, copies, strict=True))
    assert not torch.equal(first_results[0], second_results[0])


def test_an_index_outside_its_table_is_refused(ops: CpuOps) -> None:
    plan, _ = compile_step(ops, make_step_inputs([3, 20]), step_with_many_operations(ops, "float32", 32))
    for name, invalid_id in (("tokens", 50), ("tokens", -1), ("positions", 100)):
        step_inputs = make_step_inputs([5, 9])
        step_inputs[name][1] = invalid_id
        with pytest.raises(IndexError, match="take_rows"):
            plan.replay(list(step_inputs.values()))
    plan.replay(list(make_step_inputs([5, 9]).values()))


def test_the_error_names_an_operation_without_a_kernel(ops: CpuOps) -> None:
    x = torch.randn(3, 8)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(UnrecordableStepError, match=r"^rms_norm has no kernel"):
            compile_step(
                ops,
                {"x": x.to(dtype)},
                lambda step_ops, step_inputs: [step_ops.rms_norm(step_inputs["x"], torch.ones(8), 1e-5)],
            )


def test_compiling_does_not_run_the_reference(ops: CpuOps) -> None:
    """Compiling must not write to the KV cache, whose slots earlier steps have filled."""
    cache = torch.zeros(2, 3, 1, 16, 8)
    k = torch.randn(1, 1, 8).half()  # the C++ kernels do not support float16
    step_inputs = {"tables": torch.zeros(1, 2).int(), "slots": torch.tensor([20]), "k": k}

    def step(step_ops: Ops) -> list[Tensor]:
        step_ops.store_kv(
            step_inputs["k"], step_inputs["k"], LayerKV(cache, step_inputs["tables"], step_inputs["slots"])
        )
        return []

    plan = record(ops, step_inputs, step)
    cache.zero_()
    with pytest.raises(UnrecordableStepError, match=r"^store_kv"):
        CompiledPlan(
            plan, ops, step_inputs, torch.empty(plan.arena_bytes, dtype=torch.uint8), CoreContention()
        )
    assert not cache.any()


# ---- conditions for compiling a step ----


def test_a_step_is_recorded_without_computing(ops: CpuOps) -> None:
    """Recording does not write to the KV cache. The cache holds only the values that the replay stored."""
    cache = torch.zeros(2, 3, 1, 16, 8)
    graphs, caches_at_recording = GraphCache(CpuGraphCompiler(ops)), []

    def step(step_ops: Ops, step_inputs: Mapping[str, Tensor]) -> list[Tensor]:
        x = step_ops.scale(step_inputs["x"], 2.0)
        k = x.view(1, 1, -1)[..., :8]
        step_ops.store_kv(k, k, LayerKV(cache, step_inputs["tables"], step_inputs["slots"]))
        caches_at_recording.append(cache.clone())
        return [x]

    for slot in (20, 21):
        tensors = {"x": torch.ones(1, 8), "tables": torch.zeros(1, 1).int(), "slots": torch.tensor([slot])}
        results = graphs.run("a", tensors, step)
    assert results is not None
    assert len(caches_at_recording) == 1
    assert not caches_at_recording[0].any()
    assert cache[:, 1, 0, 5].eq(2).all()
    assert not cache[:, 1, 0, 4].any()


def double(step_ops: Ops, step_inputs: Mapping[str, Tensor]) -> list[Tensor]:
    return [step_ops.scale(step_inputs["x"], 2.0)]


def test_a_step_is_recorded_when_its_shape_occurs_again(ops: CpuOps) -> None:
    graphs = GraphCache(CpuGraphCompiler(ops))
    assert graphs.status is None
    assert graphs.run("a", {"x": torch.randn(2, 8)}, double) is None
    assert graphs.status == "eager: a step of this shape ran once"
    for _ in range(3):
        x = torch.randn(2, 8)
        results = graphs.run("a", {"x": x}, double)
        assert results is not None
        assert torch.equal(results[0][:, :8], 2 * x)
        assert graphs.status == "compiled: 1 kernels in one call"


def test_an_unrecordable_step_is_tried_once(ops: CpuOps) -> None:
    graphs, back_ends = GraphCache(CpuGraphCompiler(ops)), []

    def step(step_ops: Ops, step_inputs: Mapping[str, Tensor]) -> list[Tensor]:
        back_ends.append(step_ops.name)
        return [step_ops.scale(step_inputs["x"] + 1, 2.0)]

    for _ in range(4):
        assert graphs.run("a", {"x": torch.randn(8, 8)}, step) is None
    assert back_ends == ["recording"]
    assert graphs.status is not None
    assert "comes from no recorded operation" in graphs.status


def test_a_larger_arena_keeps_earlier_steps_correct(ops: CpuOps) -> None:
    graphs = GraphCache(CpuGraphCompiler(ops))
    for num_rows in (1, 50, 1, 50, 1, 400, 50, 1, 400):
        for _ in range(2):
            x = torch.randn(num_rows)
            results = graphs.run(
                num_rows,
                {"x": x},
                lambda step_ops, step_inputs: double(step_ops, {"x": step_inputs["x"].view(1, -1)}),
            )
            if results is not None:
                assert torch.equal(results[0][0], 2 * x)
    assert graphs.status == "compiled: 1 kernels in one call"
    assert graphs.last_graph is not None


def tiny_language_model(ops: CpuOps) -> Step:
    """Return a step from tokens to logits with attention over a KV cache.

    Its logits depend on all previous steps.
    """
    table, head = torch.randn(50, 32), ops.pack_linear(torch.randn(50, 32), "float32")
    cache = torch.zeros(2, 10, 2, 16, 16)

    def step(ops: Ops, step_inputs: Mapping[str, Tensor]) -> list[Tensor]:
        kv = LayerKV(cache, step_inputs["tables"], step_inputs["slots"])
        x = ops.embedding(step_inputs["tokens"], table)
        num_heads = x.view(-1, 2, 16)
        ops.store_kv(num_heads, num_heads, kv)
        attended = ops.attention(num_heads, kv, step_inputs["offsets"], step_inputs["lengths"], scale=0.25)
        return [ops.linear(ops.add(x, attended.flatten(1)), head)]

    return step


def advance_inputs(step_inputs: Mapping[str, Tensor], num_steps: int) -> dict[str, Tensor]:
    """Return the inputs of the step that is ``num_steps`` steps later. The tokens stay unchanged."""
    lengths = step_inputs["lengths"].long() + num_steps
    last_positions = lengths - 1
    slots = (
        step_inputs["tables"].long()[torch.arange(len(last_positions)), last_positions // 16] * 16
        + last_positions % 16
    )
    return {**step_inputs, "positions": last_positions, "lengths": lengths.int(), "slots": slots}


def make_sampling_inputs(num_rows: int, temperature: float) -> SamplingInputs:
    return SamplingInputs(
        torch.full((num_rows,), temperature),
        torch.zeros(num_rows, dtype=torch.int64),
        torch.full((num_rows,), 0.95),
        torch.zeros(num_rows),
        torch.zeros(num_rows, dtype=torch.float64),
    )


def no_stop_tokens(num_rows: int) -> Tensor:
    return torch.full((num_rows, 1), -1)


@pytest.mark.parametrize("temperature", [0.0, 5.0])
@pytest.mark.parametrize("lengths", [[7], [3, 20], [15, 30, 40]])
def test_replay_steps_equals_single_steps(ops: CpuOps, lengths: list[int], temperature: float) -> None:
    step, num_steps, num_rows = tiny_language_model(ops), 7, len(lengths)
    step_inputs = {
        "tokens": torch.randint(0, 50, (num_rows,)),
        "tables": (1 + torch.randperm(9))[: 3 * num_rows].view(num_rows, 3).int(),
        "offsets": torch.arange(num_rows + 1).int(),
        "lengths": torch.tensor(lengths).int(),
    }
    step_inputs = advance_inputs(step_inputs, 0)
    plan, _ = compile_step(ops, step_inputs, step)
    sampling, uniforms = (
        make_sampling_inputs(num_rows, temperature),
        torch.rand(num_steps, num_rows, dtype=torch.float64),
    )
    steps = [advance_inputs(step_inputs, num_later_steps) for num_later_steps in range(num_steps)]
    step_values = {
        name: torch.stack([step[name] for step in steps]) for name in ("positions", "lengths", "slots")
    }
    tokens, expected = step_inputs["tokens"], []
    for inputs, step_uniforms in zip(steps, uniforms, strict=True):
        (logits,) = step(ops, {**inputs, "tokens": tokens})
        tokens = ops.sample(logits, replace(sampling, uniforms=step_uniforms.clone()))
        expected.append(tokens)
    for _ in range(2):  # the second run does not depend on what the first one stored
        sampled_ids = plan.replay_steps(
            list(step_inputs.values()), step_values, sampling, uniforms, no_stop_tokens(num_rows)
        )
        assert torch.equal(sampled_ids, torch.stack(expected))
    if temperature:
        assert len(set(sampled_ids.flatten().tolist())) > 1


def test_replay_steps_stops_when_every_row_has_ended(ops: CpuOps) -> None:
    step, num_steps = tiny_language_model(ops), 8
    step_inputs = advance_inputs(make_step_inputs([3, 20]), 0)
    plan, _ = compile_step(ops, step_inputs, step)
    steps = [advance_inputs(step_inputs, num_later_steps) for num_later_steps in range(num_steps)]
    step_values = {
        name: torch.stack([step[name] for step in steps]) for name in ("positions", "lengths", "slots")
    }
    uniforms = torch.rand(num_steps, 2, dtype=torch.float64)

    def run(stop_tokens: Tensor) -> Tensor:
        return plan.replay_steps(
            list(step_inputs.values()), step_values, make_sampling_inputs(2, 1.0), uniforms, stop_tokens
        )

    full_tokens = run(no_stop_tokens(2))
    assert len(full_tokens) == num_steps
    stop_steps = [
        full_tokens[:, row].tolist().index(int(full_tokens[step_number, row]))
        for row, step_number in ((0, 1), (1, 4))
    ]
    stop_tokens = torch.tensor([[-1, int(full_tokens[1, 0])], [int(full_tokens[4, 1]), -1]])
    assert torch.equal(run(stop_tokens), full_tokens[: max(stop_steps) + 1])
    stop_tokens[0] = -1
    assert len(run(stop_tokens)) == num_steps, "a row without stop tokens continues"


def test_a_row_with_non_finite_logits_does_not_stop_the_batch(ops: CpuOps) -> None:
    """The sampled tokens of the row are -1. The other row gets valid tokens."""
    step = tiny_language_model(ops)

    def add_noise(ops: Ops, step_inputs: Mapping[str, Tensor]) -> list[Tensor]:
        (logits,) = step(ops, step_inputs)
        return [ops.add(logits, step_inputs["noise"])]

    step_inputs = advance_inputs(make_step_inputs([3, 20]), 0)
    step_inputs["noise"] = torch.tensor([[torch.nan], [0.0]]).repeat(1, 50)
    plan, _ = compile_step(ops, step_inputs, add_noise)
    steps = [advance_inputs(step_inputs, num_later_steps) for num_later_steps in range(3)]
    step_values = {
        name: torch.stack([step[name] for step in steps]) for name in ("positions", "lengths", "slots")
    }
    uniforms = torch.rand(3, 2, dtype=torch.float64)
    sampled_ids = plan.replay_steps(
        list(step_inputs.values()), step_values, make_sampling_inputs(2, 1.0), uniforms, no_stop_tokens(2)
    )
    assert sampled_ids[:, 0].tolist() == [-1, -1, -1]
    assert bool((sampled_ids[:, 1] >= 0).all())


def test_replay_steps_refuses_a_token_outside_its_table(ops: CpuOps) -> None:
    step_inputs = advance_inputs(make_step_inputs([3, 20]), 0)
    plan, _ = compile_step(ops, step_inputs, tiny_language_model(ops))
    invalid_inputs = {**step_inputs, "tokens": torch.tensor([1, 50])}
    step_values = {"lengths": step_inputs["lengths"].repeat(4, 1)}
    uniforms = torch.zeros(4, 2, dtype=torch.float64)
    with pytest.raises(IndexError, match="take_rows"):
        plan.replay_steps(
            list(invalid_inputs.values()),
            step_values,
            make_sampling_inputs(2, 0.0),
            uniforms,
            no_stop_tokens(2),
        )
