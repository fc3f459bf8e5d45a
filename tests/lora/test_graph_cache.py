"""Replayed steps with adapters are bit-equal to eager steps, also after the slots change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import write_adapter
from support.checkpoints import write_checkpoint
from support.pipeline_steps import (
    append_token,
    generate_tokens,
    make_context,
    open_pipeline,
    random_tokens,
    step_logits,
)

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


def open_with_adapters(
    checkpoint: Path, adapters: dict[str, Path], isa: str, encoding: str, *, compiled: bool, **config: Any
) -> TextGenerationPipeline:
    lora = tuple(f"{name}={path}" for name, path in adapters.items())
    options = {"kv_cache_block_size": 16, "enable_prefix_caching": False, "quantization_encoding": encoding}
    pipeline = open_pipeline(checkpoint, lora=lora, **{**options, **config})
    vars(pipeline.session)["ops"] = next(ops for ops in cpu.variants() if ops.isa == isa)
    pipeline.session.use_graphs = compiled
    return pipeline


class Recorder:
    """Runs contexts step by step, and records the logits and whether each step was replayed."""

    def __init__(self, pipeline: TextGenerationPipeline) -> None:
        self.pipeline = pipeline
        self.manager: Any = pipeline.model.lora_manager
        self.logits: list[torch.Tensor] = []
        self.was_replayed: list[str] = []

    def run(self, contexts: Sequence[TextContext], steps: int = 1, rows: int = 1) -> None:
        for _ in range(steps):
            for context in contexts:
                end = min(context.start_idx + rows, context.current_length)
                context.set_token_indices(active_idx=end)
            logits = step_logits(self.pipeline, contexts)
            self.logits += logits
            self.was_replayed.append(self.pipeline.session.graph_status.partition(":")[0])
            for context, context_logits in zip(contexts, logits, strict=True):
                append_token(self.pipeline, context, int(context_logits[-1].argmax()))

    def begin(self, *names: str | None) -> list[TextContext]:
        contexts = [
            make_context(random_tokens(3 + i, 130, seed=i), adapter=name) for i, name in enumerate(names)
        ]
        self.run(contexts, rows=100)
        return contexts

    def release(self, contexts: Sequence[TextContext]) -> None:
        for context in contexts:
            self.pipeline.release(context)


def run_changing_batches(pipeline: TextGenerationPipeline, adapters: dict[str, Path]) -> Recorder:
    """Run batches of equal shape with three adapters in two slots. Return the recorder.

    The batches also have rows without an adapter. Between replays, slots get other adapters. One name is
    reloaded with other content, and then with its first content.
    """
    recorder = Recorder(pipeline)
    first = recorder.begin("all", None, "some")
    recorder.run(first, 4)
    recorder.run([first[1], first[2], first[0]], 3)
    recorder.release(first)
    second = recorder.begin("head", None, "all")  # adapter "head" replaces "some" in its slot
    recorder.run(second, 5)
    recorder.run(second[:2], 3)
    recorder.release(second)
    third = recorder.begin("some", "some", "some")
    recorder.run(third, 3)
    recorder.manager.load("some", str(adapters["all"]))  # the third request keeps the earlier content
    recorder.run(third, 2)
    recorder.release(third)
    fourth = recorder.begin("some", None, "head")
    recorder.run(fourth, 3)
    recorder.manager.unload("head")
    recorder.run(fourth, 2)
    recorder.release(fourth)
    recorder.manager.load("some", str(adapters["some"]))
    fifth = recorder.begin("some", None, "all")
    recorder.run(fifth, 3)
    recorder.run(fifth[1:2], 3)  # no request has an adapter
    recorder.run(fifth[::2], 3, rows=2)
    recorder.release(fifth)
    return recorder


@pytest.mark.parametrize(("isa", "encoding"), CASES)
def test_replayed_steps_are_bit_equal_to_eager_steps(
    checkpoint: Path, adapters: dict[str, Path], isa: str, encoding: str
) -> None:
    compiled_pipeline, eager_pipeline = (
        run_changing_batches(
            open_with_adapters(checkpoint, adapters, isa, encoding, compiled=each, max_loras=2), adapters
        )
        for each in (True, False)
    )
    for number, (compiled_row, eager_row) in enumerate(
        zip(compiled_pipeline.logits, eager_pipeline.logits, strict=True)
    ):
        assert torch.equal(compiled_row, eager_row), f"sequence {number}"
    was_replayed = Counter(compiled_pipeline.was_replayed)
    assert was_replayed["compiled"] >= len(compiled_pipeline.was_replayed) * 2 // 3, (
        compiled_pipeline.was_replayed
    )
    assert set(eager_pipeline.was_replayed) == {"eager"}


@pytest.fixture
def two_threads() -> Iterator[None]:
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(previous_threads)


@pytest.mark.usefixtures("two_threads")
def test_wide_layers_with_adapters_are_bit_equal_to_eager_steps(tmp_path: Path) -> None:
    """The layers are so wide that threads divide the ranks and outputs of a row, and of few and many rows."""
    sizes = {"hidden_size": 384, "intermediate_size": 640, "num_hidden_layers": 1}
    checkpoint = write_checkpoint(tmp_path / "base", tiny_config() | sizes)
    adapters = {
        name: write_adapter(checkpoint, tmp_path / name, seed, r=rank, lora_alpha=1)
        for seed, (name, rank) in enumerate({"large": 64, "small": 8}.items())
    }
    scripts = []
    for is_compiled in (True, False):
        torch.set_num_threads(2 if is_compiled else 1)
        recorder = Recorder(
            open_with_adapters(checkpoint, adapters, ISAS[-1], "bfloat16", compiled=is_compiled)
        )
        for names in (["large"], ["small"], ["large", "small", None, "large", "large", None, "large"]):
            contexts = recorder.begin(*names)
            recorder.run(contexts, 4)
            for context in contexts:  # the next run recomputes the text in chunks of eight rows
                recorder.pipeline.kv.release(context)
                context.reset()
            recorder.run(contexts, 2, rows=8)
            recorder.release(contexts)
        scripts.append(recorder)
    for first_row, second_row in zip(scripts[0].logits, scripts[1].logits, strict=True):
        assert torch.equal(first_row, second_row)
    assert "compiled" in scripts[0].was_replayed


def test_text_of_a_batch_equals_text_of_single_requests(checkpoint: Path, adapters: dict[str, Path]) -> None:
    names = ["all", None, "some", "head", "all"]

    def contexts() -> list[TextContext]:
        return [make_context(random_tokens(9, 130, seed=i), 12, adapter=name) for i, name in enumerate(names)]

    pipeline = open_with_adapters(checkpoint, adapters, ISAS[-1], "bfloat16", compiled=True)
    texts = generate_tokens(pipeline, contexts(), 4)
    assert pipeline.session.graph_status.startswith("compiled")
    eager_pipeline = open_with_adapters(checkpoint, adapters, ISAS[-1], "bfloat16", compiled=False)
    assert texts == [generate_tokens(eager_pipeline, [context])[0] for context in contexts()]
    assert len({tuple(text) for text in texts}) > 1


def test_a_batch_without_adapters_has_no_adapter_kernels(checkpoint: Path, adapters: dict[str, Path]) -> None:
    """The compiled step contains no adapter kernels, before and after steps with adapters."""
    statuses = []
    for loaded_adapters in ({}, adapters):
        recorder = Recorder(
            open_with_adapters(
                checkpoint, loaded_adapters, ISAS[-1], "bfloat16", compiled=True, enable_lora=True
            )
        )
        for names in ([None, None], ["all", None] if loaded_adapters else [], [None, None]):
            contexts = recorder.begin(*names) if names else []
            if names:
                recorder.run(contexts, 3)
                statuses.append(recorder.pipeline.session.graph_status)
            recorder.release(contexts)
    assert len(set(statuses[:3] + statuses[4:])) == 1
    kernels = [int(status.split()[1]) for status in (statuses[0], statuses[3])]
    assert kernels[1] > kernels[0], "a batch with adapters has kernels for them"


def test_an_adapter_on_more_layers_compiles_new_steps(checkpoint: Path, adapters: dict[str, Path]) -> None:
    """Steps compiled earlier do not include layers that were added later."""
    few = {name: adapters[name] for name in ("some", "all")}
    compiled_pipeline, eager_pipeline = (
        Recorder(open_with_adapters(checkpoint, few, ISAS[-1], "bfloat16", compiled=each))
        for each in (True, False)
    )
    for recorder in (compiled_pipeline, eager_pipeline):
        for name in ("some", "some", "all", "some"):  # all shapes are compiled before adapter "all" is used
            contexts = recorder.begin(name, None)
            recorder.run(contexts, 3)
            recorder.release(contexts)
    for compiled_row, eager_row in zip(compiled_pipeline.logits, eager_pipeline.logits, strict=True):
        assert torch.equal(compiled_row, eager_row)
    assert compiled_pipeline.was_replayed[-1] == "compiled"


def test_the_output_head_applies_the_adapters_of_the_selected_rows(
    checkpoint: Path, adapters: dict[str, Path]
) -> None:
    """Only the last rows of chunks pass through the output head, in eager and replayed steps."""
    pipeline = open_with_adapters(checkpoint, adapters, ISAS[-1], "bfloat16", compiled=True)
    model: Any = pipeline.model
    kv: Any = pipeline.kv
    names = ["all", None, "head", "some", "head"]
    contexts = [make_context(random_tokens(3 + i, 130, seed=i), adapter=name) for i, name in enumerate(names)]
    expected = torch.stack([logits[-1] for logits in step_logits(pipeline, contexts)])
    was_replayed = []
    for _ in range(3):
        inputs = model.prepare_initial_token_inputs([contexts], kv.inputs(contexts))
        assert torch.equal(model.execute(inputs).logits.float(), expected)
        was_replayed.append(pipeline.session.graph_status.partition(":")[0])
    assert was_replayed == ["eager", "compiled", "compiled"]
