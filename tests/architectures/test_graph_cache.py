"""Replayed compiled steps are bit-equal to eager steps, in a scenario with prefills and a preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline_steps import append_token, make_context, open_pipeline, random_tokens, step_logits

from penstock.kernels import cpu
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.reference import ReferenceOps
from penstock.nn import ReturnHiddenStates
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import TextContext

pytestmark = [
    pytest.mark.families,
    pytest.mark.skipif(not cpu.available_isas(), reason="the C++ kernels are not built"),
]

CASES = [
    *((isa, "bfloat16") for isa in cpu.available_isas()),
    *((isa, "float32") for isa in cpu.available_isas()[-2:]),
    *((isa, encoding) for isa in cpu.available_isas()[-1:] for encoding in ("int8", "int4")),
]


def open_on_isa(checkpoint: Path, isa: str, encoding: str, *, is_compiled: bool) -> TextGenerationPipeline:
    options: dict[str, Any] = {"quantization_encoding": encoding, "kv_cache_block_size": 16}
    pipeline = open_pipeline(checkpoint, enable_prefix_caching=False, **options)
    vars(pipeline.session)["ops"] = next(ops for ops in cpu.variants() if ops.isa == isa)
    pipeline.session.use_graphs = is_compiled
    return pipeline


def last_logits(pipeline: TextGenerationPipeline, contexts: list[TextContext]) -> torch.Tensor:  # [B, V]
    """Return the logits of the last row of each context."""
    kv: Any = pipeline.kv
    for context in contexts:
        kv.claim(context)
        kv.reserve(context)
    model: Any = pipeline.model
    logits: torch.Tensor = model.execute(
        model.prepare_initial_token_inputs([contexts], kv.inputs(contexts))
    ).logits
    return logits


def run_scenario(pipeline: TextGenerationPipeline) -> list[torch.Tensor]:
    """Run three requests through prefill, block and window boundaries, preemption and resumption.

    Returns the logits of all steps.
    """
    recorded_logits: list[torch.Tensor] = []

    def run_step(*contexts: TextContext, num_rows: int = 1) -> None:
        for context in contexts:
            context.set_token_indices(active_idx=min(context.start_idx + num_rows, context.current_length))
        logits = step_logits(pipeline, contexts)
        recorded_logits.extend(logits)
        for context, context_logits in zip(contexts, logits, strict=True):
            append_token(pipeline, context, int(context_logits[-1].argmax()))

    short_context, medium_context, long_context = (
        make_context(random_tokens(n, 130, seed=n)) for n in (5, 20, 33)
    )
    run_step(short_context, num_rows=5)
    for _ in range(30):  # The sequence crosses two block boundaries.
        run_step(short_context)
    run_step(medium_context, num_rows=20)
    run_step(long_context, num_rows=33)
    for _ in range(20):
        run_step(long_context, short_context, medium_context)
    pipeline.release(medium_context)  # The scheduler preempts a context in this way if no block is free.
    medium_context.reset()
    for _ in range(3):
        run_step(short_context)
        run_step(short_context, long_context)
    # The preempted context is recomputed in chunks, in batches with single tokens of another context.
    for number in range(8):
        medium_context.set_token_indices(active_idx=medium_context.start_idx + 4)
        contexts = [medium_context, long_context] if number % 3 else [long_context, medium_context]
        logits = last_logits(pipeline, contexts)
        recorded_logits.append(logits)
        for context, context_logits in zip(contexts, logits, strict=True):
            append_token(pipeline, context, int(context_logits.argmax()))
    run_step(medium_context, num_rows=100)
    for _ in range(6):
        run_step(short_context, medium_context, long_context)
    return recorded_logits


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_replayed_steps_are_bit_equal_to_eager_steps(checkpoint: Path, case: tuple[str, str]) -> None:
    isa, encoding = case
    compiled_pipeline, eager_pipeline = (
        open_on_isa(checkpoint, isa, encoding, is_compiled=is_compiled) for is_compiled in (True, False)
    )
    actual_logits, expected = run_scenario(compiled_pipeline), run_scenario(eager_pipeline)
    assert len(actual_logits) == len(expected)
    for number, (actual, reference) in enumerate(zip(actual_logits, expected, strict=True)):
        assert torch.equal(actual, reference), f"step {number}"
    graph_status = compiled_pipeline.session.graph_status
    assert graph_status.startswith("compiled")
    assert eager_pipeline.session.graph_status == "eager: compiled steps are disabled"


def test_the_graph_compiler_belongs_to_the_current_back_end(checkpoint: Path) -> None:
    pipeline = open_on_isa(checkpoint, cpu.available_isas()[-1], "float32", is_compiled=True)
    for ops in (*cpu.variants(), ReferenceOps()):
        vars(pipeline.session)["ops"] = ops
        graphs = pipeline.session.graphs
        compiler: Any = graphs.compiler if graphs else None
        assert (compiler and compiler.ops) is (ops if isinstance(ops, CpuOps) else None)
    assert pipeline.session.graph_status == "eager: the reference kernels cannot compile steps"
    assert pipeline.session.compiled_steps == "none"


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("hidden_states", list(ReturnHiddenStates))
def test_replayed_hidden_states_are_bit_equal_to_eager_ones(
    checkpoint: Path, hidden_states: ReturnHiddenStates
) -> None:
    states: list[list[torch.Tensor | None]] = []
    for is_compiled in (True, False):
        pipeline = open_on_isa(checkpoint, cpu.available_isas()[-1], "float32", is_compiled=is_compiled)
        pipeline.model.return_hidden_states = hidden_states
        context = make_context(random_tokens(9, 130))
        states.append([])
        for _ in range(4):
            pipeline.kv.claim(context)
            pipeline.kv.reserve(context)
            model: Any = pipeline.model
            kv: Any = pipeline.kv
            inputs = model.prepare_initial_token_inputs([[context]], kv.inputs([context]))
            states[-1].append(model.execute(inputs).hidden_states)
            append_token(pipeline, context, 7)
    for compiled_states, eager_states in zip(*states, strict=True):
        assert (compiled_states is None) == (hidden_states is ReturnHiddenStates.NONE)
        assert compiled_states is None or torch.equal(compiled_states, eager_states)
