"""A replay of a recorded step on other inputs equals the step on these inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpoints import DECODERS, write_checkpoint
from support.pipeline_steps import make_context, open_pipeline, random_tokens

from penstock.kernels import OPERATIONS, Ops, StepInputs
from penstock.kernels.operations import UnrecordableStepError
from penstock.kernels.recording import Plan, record
from penstock.kernels.reference import ReferenceOps
from penstock.pipelines import TextGenerationPipeline


@pytest.fixture(scope="module", params=DECODERS, ids=lambda architecture: architecture.name)
def pipeline(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TextGenerationPipeline:
    folder = write_checkpoint(tmp_path_factory.mktemp("recorded"), request.param.tiny_config())
    return open_pipeline(folder, deterministic=True, kv_cache_block_size=16, max_batch_size=64)


def decode_inputs(pipeline: TextGenerationPipeline, lengths: list[int]) -> Any:
    """Prefill prompts of these lengths, and return the inputs of the decode step after them."""
    contexts = {str(n): make_context(random_tokens(n, 130, seed=n)) for n in lengths}
    pipeline.execute(contexts)
    for context in contexts.values():
        pipeline.kv.reserve(context)
    batch = list(contexts.values())
    kv: Any = pipeline.kv
    model: Any = pipeline.model
    return model.prepare_initial_token_inputs([batch], kv.inputs(batch))


def input_tensors(inputs: Any) -> dict[str, torch.Tensor]:
    block_tables = {f"tables.{i}": group.block_tables for i, group in enumerate(inputs.kv.groups)}
    slots = {f"slots.{i}": group.slots for i, group in enumerate(inputs.kv.groups)}
    rows = {name: getattr(inputs, name) for name in ("tokens", "positions", "row_offsets", "logit_rows")}
    kv = inputs.kv
    states = {} if kv.states is None else {"states": kv.states.slots, "saves": kv.states.saves}
    return rows | block_tables | slots | states | {"lengths": inputs.kv.lengths}


def run_step(pipeline: TextGenerationPipeline, inputs: Any, ops: Ops) -> torch.Tensor:
    model: Any = pipeline.model
    step = StepInputs(ops, inputs.positions, inputs.row_offsets, inputs.kv)
    with torch.inference_mode():
        _, normalized = model.network(inputs.tokens, step)
        logits: torch.Tensor = model.network.head(ops.take_rows(normalized, inputs.logit_rows), step)
    return logits


def record_step(pipeline: TextGenerationPipeline, inputs: Any) -> Plan:
    return record(ReferenceOps(), input_tensors(inputs), lambda ops: [run_step(pipeline, inputs, ops)])


def test_a_replay_on_other_inputs_equals_the_step(pipeline: TextGenerationPipeline) -> None:
    plan = record_step(pipeline, decode_inputs(pipeline, [20, 33]))
    other_inputs = decode_inputs(pipeline, [28, 47])
    states = other_inputs.kv.states
    restore_states = (lambda: None) if states is None else states.snapshot()
    expected = run_step(pipeline, other_inputs, ReferenceOps())
    restore_states()
    (logits,) = plan.replay(ReferenceOps(), input_tensors(other_inputs))
    assert torch.equal(logits, expected)


def test_the_arena_reuses_the_memory_of_finished_results(pipeline: TextGenerationPipeline) -> None:
    plan = record_step(pipeline, decode_inputs(pipeline, list(range(5, 13))))
    results = [result for record in plan.records for result in record.results]
    total_bytes = sum(torch.Size(result.shape).numel() * result.dtype.itemsize for result in results)
    assert plan.arena_bytes < total_bytes / 2
    assert {record.operation for record in plan.records} <= set(OPERATIONS)


def test_a_plan_holds_each_weight_once(pipeline: TextGenerationPipeline) -> None:
    plan = record_step(pipeline, decode_inputs(pipeline, [5]))
    pointers = [weight.untyped_storage().data_ptr() for weight in plan.weights]
    assert len(set(pointers)) == len(pointers)
    kv: Any = pipeline.kv
    assert {cache.untyped_storage().data_ptr() for cache in kv.storage.caches} <= set(pointers)


def test_a_call_outside_the_operations_is_detected() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(UnrecordableStepError, match=r"\(3, 8\).* no recorded operation"):
        record(ReferenceOps(), {"x": x}, lambda ops: [ops.rms_norm(x * 2, torch.ones(8), 1e-5)])


def test_a_result_outside_the_operations_is_detected() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(UnrecordableStepError):
        record(ReferenceOps(), {"x": x}, lambda ops: [ops.rms_norm(x, torch.ones(8), 1e-5) + 1])


def test_views_between_operations_are_recorded() -> None:
    x, rows = torch.randn(4, 16), torch.tensor([2, 0])

    def step(ops: Ops) -> list[torch.Tensor]:
        gate_output = ops.gated_activation(x.view(4, 16), "gelu")  # [4, 8]
        changed_rows = ops.put_rows(gate_output, rows, gate_output[:2])
        return [ops.take_rows(changed_rows, rows)]

    plan = record(ReferenceOps(), {"x": x, "rows": rows}, step)
    other_x, other_rows = torch.randn(4, 16), torch.tensor([1, 3])
    (result,) = plan.replay(ReferenceOps(), {"x": other_x, "rows": other_rows})
    gate_output = ReferenceOps().gated_activation(other_x, "gelu")
    expected = ReferenceOps().put_rows(gate_output, other_rows, gate_output[:2])[other_rows]
    assert torch.equal(result, expected)


def test_weights_that_share_memory_are_recorded_separately() -> None:
    memory = torch.zeros(1024, dtype=torch.uint8)
    table, norm = memory[128:640].view(torch.bfloat16).view(16, 16), memory[640:704].view(torch.float32)
    table.copy_(torch.randn(16, 16))
    norm.copy_(torch.randn(16))
    tokens = torch.tensor([3, 1])

    def step(ops: Ops) -> list[torch.Tensor]:
        return [ops.rms_norm(ops.embedding(tokens, table), norm, 1e-5)]

    plan = record(ReferenceOps(), {"tokens": tokens}, step)
    (result,) = plan.replay(ReferenceOps(), {"tokens": torch.tensor([15, 7])})
    assert torch.equal(result, ReferenceOps().rms_norm(table[[15, 7]], norm, 1e-5))
