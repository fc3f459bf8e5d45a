"""A replayed step gives the bits of the eager step, independent of other steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.running import context_of, feed, open_pipeline, random_tokens, step_logits

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


def opened(checkpoint: Path, isa: str, encoding: str, *, compiled: bool) -> TextGenerationPipeline:
    options: dict[str, Any] = {"quantization_encoding": encoding, "kv_cache_block_size": 16}
    pipeline = open_pipeline(checkpoint, enable_prefix_caching=False, **options)
    vars(pipeline.session)["ops"] = next(ops for ops in cpu.variants() if ops.isa == isa)
    pipeline.session.use_graphs = compiled
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


def logits_of_a_script(pipeline: TextGenerationPipeline) -> list[torch.Tensor]:
    """Run sequences that arrive, grow across block and window limits, are preempted and continue; return the
    logits."""
    seen: list[torch.Tensor] = []

    def run(*contexts: TextContext, rows: int = 1) -> None:
        for context in contexts:
            context.set_token_indices(active_idx=min(context.start_idx + rows, context.current_length))
        logits = step_logits(pipeline, contexts)
        seen.extend(logits)
        for context, own in zip(contexts, logits, strict=True):
            feed(pipeline, context, int(own[-1].argmax()))

    one, two, three = (context_of(random_tokens(n, 130, seed=n)) for n in (5, 20, 33))
    run(one, rows=5)
    for _ in range(30):  # over two ends of blocks
        run(one)
    run(two, rows=20)
    run(three, rows=33)
    for _ in range(20):
        run(three, one, two)
    pipeline.release(two)  # as the scheduler does when memory runs out
    two.reset()
    for _ in range(3):
        run(one)
        run(one, three)
    for number in range(8):  # computes its text again in chunks, beside single tokens of another sequence
        two.set_token_indices(active_idx=two.start_idx + 4)
        contexts = [two, three] if number % 3 else [three, two]
        logits = last_logits(pipeline, contexts)
        seen.append(logits)
        for context, own in zip(contexts, logits, strict=True):
            feed(pipeline, context, int(own.argmax()))
    run(two, rows=100)
    for _ in range(6):
        run(one, two, three)
    return seen


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_bits_of_an_eager_step(checkpoint: Path, case: tuple[str, str]) -> None:
    isa, encoding = case
    compiled, eager = (opened(checkpoint, isa, encoding, compiled=each) for each in (True, False))
    got, expected = logits_of_a_script(compiled), logits_of_a_script(eager)
    assert len(got) == len(expected)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(one, other), f"step {number}"
    status = compiled.session.graph_status
    assert status.startswith("compiled")
    assert eager.session.graph_status == "eager: compiled steps are disabled"


def test_another_back_end_has_no_plans_of_the_first(checkpoint: Path) -> None:
    pipeline = opened(checkpoint, cpu.available_isas()[-1], "float32", compiled=True)
    for ops in (*cpu.variants(), ReferenceOps()):
        vars(pipeline.session)["ops"] = ops
        plans = pipeline.session.plans
        compiler: Any = plans.compiler if plans else None
        assert (compiler and compiler.ops) is (ops if isinstance(ops, CpuOps) else None)
    assert pipeline.session.graph_status == "eager: the reference kernels cannot compile steps"
    assert pipeline.session.planned_steps == "none"


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("wanted", list(ReturnHiddenStates))
def test_hidden_states_are_replayed(checkpoint: Path, wanted: ReturnHiddenStates) -> None:
    states: list[list[torch.Tensor | None]] = []
    for compiled in (True, False):
        pipeline = opened(checkpoint, cpu.available_isas()[-1], "float32", compiled=compiled)
        pipeline.model.return_hidden_states = wanted
        context = context_of(random_tokens(9, 130))
        states.append([])
        for _ in range(4):
            pipeline.kv.claim(context)
            pipeline.kv.reserve(context)
            model: Any = pipeline.model
            kv: Any = pipeline.kv
            inputs = model.prepare_initial_token_inputs([[context]], kv.inputs([context]))
            states[-1].append(model.execute(inputs).hidden_states)
            feed(pipeline, context, 7)
    for one, other in zip(*states, strict=True):
        assert (one is None) == (wanted is ReturnHiddenStates.NONE)
        assert one is None or torch.equal(one, other)
