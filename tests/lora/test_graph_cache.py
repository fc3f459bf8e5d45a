"""Compiled steps with LoRA adapters are bit-equal to eager steps, also after the slots change."""

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
ISAS_AND_ENCODINGS = [
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
    """Runs contexts step by step. Records the logits, and whether each step was compiled or eager."""

    def __init__(self, pipeline: TextGenerationPipeline) -> None:
        self.pipeline = pipeline
        self.manager: Any = pipeline.model.lora_manager
        self.logits: list[torch.Tensor] = []
        self.step_kinds: list[str] = []

    def run(self, contexts: Sequence[TextContext], num_steps: int = 1, rows: int = 1) -> None:
        for _ in range(num_steps):
            for context in contexts:
                end = min(context.start_idx + rows, context.current_length)
                context.set_token_indices(active_idx=end)
            logits = step_logits(self.pipeline, contexts)
            self.logits += logits
            self.step_kinds.append(self.pipeline.session.graph_status.partition(":")[0])
            for context, context_logits in zip(contexts, logits, strict=True):
                append_token(self.pipeline, context, int(context_logits[-1].argmax()))

    def start_batch(self, *names: str | None) -> list[TextContext]:
        contexts = [
            make_context(random_tokens(3 + i, 130, seed=i), adapter=name) for i, name in enumerate(names)
        ]
        self.run(contexts, rows=100)
        return contexts

    def release(self, contexts: Sequence[TextContext]) -> None:
        for context in contexts:
            self.pipeline.release(context)


def run_changing_batches(pipeline: TextGenerationPipeline, adapters: dict[str, Path]) -> Recorder:
    """Run batches, most of them of equal shape, with three adapters in two slots. Return the recorder.

    The batches also have rows without an adapter. Between replays, other adapters are loaded into the slots.
    The adapter ``some`` is reloaded with the content of ``all``, and then with its first content.
    """
    recorder = Recorder(pipeline)
    first_batch = recorder.start_batch("all", None, "some")
    recorder.run(first_batch, 4)
    recorder.run([first_batch[1], first_batch[2], first_batch[0]], 3)
    recorder.release(first_batch)
    second_batch = recorder.start_batch("head", None, "all")  # adapter "head" replaces "some" in its slot
    recorder.run(second_batch, 5)
    recorder.run(second_batch[:2], 3)
    recorder.release(second_batch)
    third_batch = recorder.start_batch("some", "some", "some")
    recorder.run(third_batch, 3)
    recorder.manager.load("some", str(adapters["all"]))  # running requests keep the earlier content
    recorder.run(third_batch, 2)
    recorder.release(third_batch)
    fourth_batch = recorder.start_batch("some", None, "head")
    recorder.run(fourth_batch, 3)
    recorder.manager.unload("head")
    recorder.run(fourth_batch, 2)
    recorder.release(fourth_batch)
    recorder.manager.load("some", str(adapters["some"]))
    fifth_batch = recorder.start_batch("some", None, "all")
    recorder.run(fifth_batch, 3)
    recorder.run(fifth_batch[1:2], 3)  # no request has an adapter
    recorder.run(fifth_batch[::2], 3, rows=2)
    recorder.release(fifth_batch)
    return recorder


@pytest.mark.parametrize(("isa", "encoding"), ISAS_AND_ENCODINGS)
def test_replayed_steps_are_bit_equal_to_eager_steps(
    checkpoint: Path, adapters: dict[str, Path], isa: str, encoding: str
) -> None:
    compiled_recorder, eager_recorder = (
        run_changing_batches(
            open_with_adapters(checkpoint, adapters, isa, encoding, compiled=is_compiled, max_loras=2),
            adapters,
        )
        for is_compiled in (True, False)
    )
    for number, (compiled_row, eager_row) in enumerate(
        zip(compiled_recorder.logits, eager_recorder.logits, strict=True)
    ):
        assert torch.equal(compiled_row, eager_row), f"sequence {number}"
    step_kinds = Counter(compiled_recorder.step_kinds)
    assert step_kinds["compiled"] >= len(compiled_recorder.step_kinds) * 2 // 3, compiled_recorder.step_kinds
    assert set(eager_recorder.step_kinds) == {"eager"}


@pytest.fixture
def two_threads() -> Iterator[None]:
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(previous_threads)


@pytest.mark.usefixtures("two_threads")
def test_replayed_wide_layers_are_bit_equal_to_eager_layers(tmp_path: Path) -> None:
    """In compiled steps, two threads divide the LoRA ranks and outputs. Eager steps use one thread."""
    sizes = {"hidden_size": 384, "intermediate_size": 640, "num_hidden_layers": 1}
    checkpoint = write_checkpoint(tmp_path / "base", tiny_config() | sizes)
    adapters = {
        name: write_adapter(checkpoint, tmp_path / name, seed, r=rank, lora_alpha=1)
        for seed, (name, rank) in enumerate({"large": 64, "small": 8}.items())
    }
    recorders = []
    for is_compiled in (True, False):
        torch.set_num_threads(2 if is_compiled else 1)
        recorder = Recorder(
            open_with_adapters(checkpoint, adapters, ISAS[-1], "bfloat16", compiled=is_compiled)
        )
        for names in (["large"], ["small"], ["large", "small", None, "large", "large", None, "large"]):
            contexts = recorder.start_batch(*names)
            recorder.run(contexts, 4)
            for context in contexts:  # the next run recomputes the text in chunks of 8 tokens
                recorder.pipeline.kv.release(context)
                context.reset()
            recorder.run(contexts, 2, rows=8)
            recorder.release(contexts)
        recorders.append(recorder)
    for compiled_row, eager_row in zip(recorders[0].logits, recorders[1].logits, strict=True):
        assert torch.equal(compiled_row, eager_row)
    assert "compiled" in recorders[0].step_kinds


def test_text_of_a_compiled_batch_equals_text_of_single_eager_requests(
    checkpoint: Path, adapters: dict[str, Path]
) -> None:
    names = ["all", None, "some", "head", "all"]

    def make_contexts() -> list[TextContext]:
        return [make_context(random_tokens(9, 130, seed=i), 12, adapter=name) for i, name in enumerate(names)]

    pipeline = open_with_adapters(checkpoint, adapters, ISAS[-1], "bfloat16", compiled=True)
    texts = generate_tokens(pipeline, make_contexts(), 4)
    assert pipeline.session.graph_status.startswith("compiled")
    eager_pipeline = open_with_adapters(checkpoint, adapters, ISAS[-1], "bfloat16", compiled=False)
    assert texts == [generate_tokens(eager_pipeline, [context])[0] for context in make_contexts()]
    assert len({tuple(text) for text in texts}) > 1


def test_a_batch_without_adapters_has_no_adapter_kernels(checkpoint: Path, adapters: dict[str, Path]) -> None:
    """Its compiled step has as many kernels as in a pipeline that loads no adapters."""
    statuses = []
    for loaded_adapters in ({}, adapters):
        recorder = Recorder(
            open_with_adapters(
                checkpoint, loaded_adapters, ISAS[-1], "bfloat16", compiled=True, enable_lora=True
            )
        )
        for names in ([None, None], ["all", None] if loaded_adapters else [], [None, None]):
            contexts = recorder.start_batch(*names) if names else []
            if names:
                recorder.run(contexts, 3)
                statuses.append(recorder.pipeline.session.graph_status)
            recorder.release(contexts)
    assert len(set(statuses[:3] + statuses[4:])) == 1
    kernel_counts = [int(status.split()[1]) for status in (statuses[0], statuses[3])]
    assert kernel_counts[1] > kernel_counts[0], "a step with adapters has more kernels"


def test_replays_are_bit_equal_after_the_use_of_an_adapter_with_more_layers(
    checkpoint: Path, adapters: dict[str, Path]
) -> None:
    """Steps that were compiled with the adapter ``some`` lack kernels for the other layers of ``all``."""
    two_adapters = {name: adapters[name] for name in ("some", "all")}
    compiled_recorder, eager_recorder = (
        Recorder(open_with_adapters(checkpoint, two_adapters, ISAS[-1], "bfloat16", compiled=is_compiled))
        for is_compiled in (True, False)
    )
    for recorder in (compiled_recorder, eager_recorder):
        for name in ("some", "some", "all", "some"):  # all shapes are compiled before adapter "all" is used
            contexts = recorder.start_batch(name, None)
            recorder.run(contexts, 3)
            recorder.release(contexts)
    for compiled_row, eager_row in zip(compiled_recorder.logits, eager_recorder.logits, strict=True):
        assert torch.equal(compiled_row, eager_row)
    assert compiled_recorder.step_kinds[-1] == "compiled"


def test_the_output_head_applies_the_adapters_of_the_selected_rows(
    checkpoint: Path, adapters: dict[str, Path]
) -> None:
    """The output head computes only the last row of each request, in eager and replayed steps."""
    pipeline = open_with_adapters(checkpoint, adapters, ISAS[-1], "bfloat16", compiled=True)
    model: Any = pipeline.model
    kv: Any = pipeline.kv
    names = ["all", None, "head", "some", "head"]
    contexts = [make_context(random_tokens(3 + i, 130, seed=i), adapter=name) for i, name in enumerate(names)]
    expected = torch.stack([logits[-1] for logits in step_logits(pipeline, contexts)])
    step_kinds = []
    for _ in range(3):
        inputs = model.prepare_initial_token_inputs([contexts], kv.inputs(contexts))
        assert torch.equal(model.execute(inputs).logits.float(), expected)
        step_kinds.append(pipeline.session.graph_status.partition(":")[0])
    assert step_kinds == ["eager", "compiled", "compiled"]
