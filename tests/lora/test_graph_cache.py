"""Replayed steps with adapters give the bits of eager steps, also after the slots have changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import write_adapter
from support.checkpoints import write_checkpoint
from support.running import context_of, feed, generate, open_pipeline, random_tokens, step_logits

from penstock.architectures.llama import tiny_config
from penstock.kernels import cpu
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import TextContext

pytestmark = pytest.mark.skipif(not cpu.available_isas(), reason="the C++ kernels are not built")

ISAS = cpu.available_isas()
CASES = [
    *((isa, "bfloat16") for isa in ISAS),
    *((isa, encoding) for isa in ISAS[-1:] for encoding in ("float32", "int8", "int4")),
]


def opened(
    checkpoint: Path, adapters: dict[str, Path], isa: str, encoding: str, *, compiled: bool, **config: Any
) -> TextGenerationPipeline:
    lora = tuple(f"{name}={path}" for name, path in adapters.items())
    options = {"kv_cache_block_size": 16, "enable_prefix_caching": False, "quantization_encoding": encoding}
    pipeline = open_pipeline(checkpoint, lora=lora, **{**options, **config})
    vars(pipeline.session)["ops"] = next(ops for ops in cpu.variants() if ops.isa == isa)
    pipeline.session.use_graphs = compiled
    return pipeline


class Script:
    """Runs contexts step by step; records the logits and whether each step was replayed."""

    def __init__(self, pipeline: TextGenerationPipeline) -> None:
        self.pipeline = pipeline
        self.manager: Any = pipeline.model.lora_manager
        self.logits: list[torch.Tensor] = []
        self.ran: list[str] = []

    def run(self, contexts: Sequence[TextContext], steps: int = 1, rows: int = 1) -> None:
        for _ in range(steps):
            for context in contexts:
                end = min(context.start_idx + rows, context.current_length)
                context.set_token_indices(active_idx=end)
            logits = step_logits(self.pipeline, contexts)
            self.logits += logits
            self.ran.append(self.pipeline.session.graph_status.partition(":")[0])
            for context, own in zip(contexts, logits, strict=True):
                feed(self.pipeline, context, int(own[-1].argmax()))

    def begin(self, *names: str | None) -> list[TextContext]:
        contexts = [
            context_of(random_tokens(3 + i, 130, seed=i), adapter=name) for i, name in enumerate(names)
        ]
        self.run(contexts, rows=100)
        return contexts

    def release(self, contexts: Sequence[TextContext]) -> None:
        for context in contexts:
            self.pipeline.release(context)


def run_changing_batches(pipeline: TextGenerationPipeline, adapters: dict[str, Path]) -> Script:
    """Run batches of one shape with three adapters in two slots, and return the recorded script.

    The batches also have rows without an adapter. Between replays, slots get other adapters, and a name is
    loaded with other content and back."""
    script = Script(pipeline)
    first = script.begin("all", None, "some")
    script.run(first, 4)
    script.run([first[1], first[2], first[0]], 3)
    script.release(first)
    second = script.begin("head", None, "all")  # takes the slot of "some"
    script.run(second, 5)
    script.run(second[:2], 3)
    script.release(second)
    third = script.begin("some", "some", "some")
    script.run(third, 3)
    script.manager.load("some", str(adapters["all"]))  # third keeps the earlier content
    script.run(third, 2)
    script.release(third)
    fourth = script.begin("some", None, "head")
    script.run(fourth, 3)
    script.manager.unload("head")
    script.run(fourth, 2)
    script.release(fourth)
    script.manager.load("some", str(adapters["some"]))
    fifth = script.begin("some", None, "all")
    script.run(fifth, 3)
    script.run(fifth[1:2], 3)  # no request has an adapter
    script.run(fifth[::2], 3, rows=2)
    script.release(fifth)
    return script


@pytest.mark.parametrize(("isa", "encoding"), CASES)
def test_the_bits_of_an_eager_step(
    checkpoint: Path, adapters: dict[str, Path], isa: str, encoding: str
) -> None:
    compiled, eager = (
        run_changing_batches(
            opened(checkpoint, adapters, isa, encoding, compiled=each, max_loras=2), adapters
        )
        for each in (True, False)
    )
    for number, (one, other) in enumerate(zip(compiled.logits, eager.logits, strict=True)):
        assert torch.equal(one, other), f"sequence {number}"
    ran = Counter(compiled.ran)
    assert ran["compiled"] >= len(compiled.ran) * 2 // 3, compiled.ran
    assert set(eager.ran) == {"eager"}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_adapters_that_all_threads_share(tmp_path: Path) -> None:
    """The layers are so wide that threads divide the ranks and outputs of one row, of a few rows and of
    many."""
    sizes = {"hidden_size": 384, "intermediate_size": 640, "num_hidden_layers": 1}
    checkpoint = write_checkpoint(tmp_path / "base", tiny_config() | sizes)
    adapters = {
        name: write_adapter(checkpoint, tmp_path / name, seed, r=rank, lora_alpha=1)
        for seed, (name, rank) in enumerate({"large": 64, "small": 8}.items())
    }
    scripts = []
    for compiled in (True, False):
        torch.set_num_threads(2 if compiled else 1)
        script = Script(opened(checkpoint, adapters, ISAS[-1], "bfloat16", compiled=compiled))
        for names in (["large"], ["small"], ["large", "small", None, "large", "large", None, "large"]):
            contexts = script.begin(*names)
            script.run(contexts, 4)
            for context in contexts:  # compute its text again, eight rows at a time
                script.pipeline.kv.release(context)
                context.reset()
            script.run(contexts, 2, rows=8)
            script.release(contexts)
        scripts.append(script)
    for one, other in zip(scripts[0].logits, scripts[1].logits, strict=True):
        assert torch.equal(one, other)
    assert "compiled" in scripts[0].ran


def test_batched_results_equal_single_results(checkpoint: Path, adapters: dict[str, Path]) -> None:
    names = ["all", None, "some", "head", "all"]

    def contexts() -> list[TextContext]:
        return [context_of(random_tokens(9, 130, seed=i), 12, adapter=name) for i, name in enumerate(names)]

    together = opened(checkpoint, adapters, ISAS[-1], "bfloat16", compiled=True)
    texts = generate(together, contexts(), 4)
    assert together.session.graph_status.startswith("compiled")
    eager = opened(checkpoint, adapters, ISAS[-1], "bfloat16", compiled=False)
    assert texts == [generate(eager, [context])[0] for context in contexts()]
    assert len({tuple(text) for text in texts}) > 1


def test_a_batch_without_adapters_has_the_plan_that_it_had(
    checkpoint: Path, adapters: dict[str, Path]
) -> None:
    """The plan contains no adapter kernels, before and after steps with adapters."""
    statuses = []
    for given in ({}, adapters):
        script = Script(opened(checkpoint, given, ISAS[-1], "bfloat16", compiled=True, enable_lora=True))
        for names in ([None, None], ["all", None] if given else [], [None, None]):
            contexts = script.begin(*names) if names else []
            if names:
                script.run(contexts, 3)
                statuses.append(script.pipeline.session.graph_status)
            script.release(contexts)
    assert len(set(statuses[:3] + statuses[4:])) == 1
    kernels = [int(status.split()[1]) for status in (statuses[0], statuses[3])]
    assert kernels[1] > kernels[0], "a batch with adapters has kernels for them"


def test_an_adapter_for_more_layers_makes_other_plans(checkpoint: Path, adapters: dict[str, Path]) -> None:
    """Earlier plans do not include layers that were added later."""
    few = {name: adapters[name] for name in ("some", "all")}
    compiled, eager = (
        Script(opened(checkpoint, few, ISAS[-1], "bfloat16", compiled=each)) for each in (True, False)
    )
    for script in (compiled, eager):
        for name in ("some", "some", "all", "some"):  # all shapes have their plans before "all" comes
            contexts = script.begin(name, None)
            script.run(contexts, 3)
            script.release(contexts)
    for one, other in zip(compiled.logits, eager.logits, strict=True):
        assert torch.equal(one, other)
    assert compiled.ran[-1] == "compiled"


def test_the_head_of_selected_rows_uses_their_adapters(checkpoint: Path, adapters: dict[str, Path]) -> None:
    """Only the last rows of chunks go through the head, in eager and replayed steps."""
    pipeline = opened(checkpoint, adapters, ISAS[-1], "bfloat16", compiled=True)
    model: Any = pipeline.model
    kv: Any = pipeline.kv
    names = ["all", None, "head", "some", "head"]
    contexts = [context_of(random_tokens(3 + i, 130, seed=i), adapter=name) for i, name in enumerate(names)]
    expected = torch.stack([logits[-1] for logits in step_logits(pipeline, contexts)])
    ran = []
    for _ in range(3):
        inputs = model.prepare_initial_token_inputs([contexts], kv.inputs(contexts))
        assert torch.equal(model.execute(inputs).logits.float(), expected)
        ran.append(pipeline.session.graph_status.partition(":")[0])
    assert ran == ["eager", "compiled", "compiled"]
