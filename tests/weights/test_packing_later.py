"""Lazy packing of floats: the first step multiplies rows, later steps panels, with equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import DECODERS, write_checkpoint
from support.running import context_of, generate, open_pipeline, random_tokens, step_logits

from penstock.engine import InferenceSession
from penstock.kernels.cpu import available_isas
from penstock.pipelines import TextGenerationPipeline
from penstock.weights import lazy_packing

pytestmark = pytest.mark.skipif(not available_isas(), reason="the C++ kernels are not built")


@pytest.fixture(autouse=True)
def _small_models_are_packed_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_packing, "MIN_LAZY_BYTES", 0)


NAMES = ["llama", "gpt2", "qwen2", "gemma2", "qwen3_moe"]


def checkpoint_of(name: str, folder: Path) -> Path:
    (architecture,) = (one for one in DECODERS if one.name == name)
    assert architecture.tiny_config is not None
    return write_checkpoint(folder, architecture.tiny_config())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of("llama", tmp_path_factory.mktemp("llama"))


def num_pending(pipeline: TextGenerationPipeline) -> int:
    model: Any = pipeline.model
    return int(model.lazy_packing.num_pending)


def num_reserved(pipeline: TextGenerationPipeline) -> int:
    return pipeline.session.reservations.num_bytes


def logits(pipeline: TextGenerationPipeline, count: int) -> torch.Tensor:
    context = context_of(random_tokens(count, 130, seed=count))
    (rows,) = step_logits(pipeline, [context])
    pipeline.release(context)
    return rows


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_equals_later_steps(name: str, encoding: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(name, tmp_path / name)
    pipeline = open_pipeline(checkpoint, quantization_encoding=encoding, enable_prefix_caching=False)
    waiting = num_pending(pipeline)
    first = logits(pipeline, 40)
    assert num_pending(pipeline) <= waiting
    second = logits(pipeline, 40)
    assert num_pending(pipeline) == 0
    assert torch.equal(first, second)
    if name == "llama":
        assert waiting > 4


def test_tokens_are_those_of_a_model_that_was_packed(tiny: Path) -> None:
    prompts = [random_tokens(n, 130, seed=n) for n in (3, 50, 17)]

    def tokens(pipeline: TextGenerationPipeline) -> list[list[int]]:
        return generate(pipeline, [context_of(prompt, 12) for prompt in prompts])

    packed = open_pipeline(tiny, quantization_encoding="bfloat16")
    packed.pack_all_pending()
    assert tokens(open_pipeline(tiny, quantization_encoding="bfloat16")) == tokens(packed)


def test_weights_are_packed_one_by_one(tiny: Path) -> None:
    pipeline = open_pipeline(tiny)
    reserved, waiting = num_reserved(pipeline), num_pending(pipeline)
    for left in range(waiting - 1, -1, -1):
        assert pipeline.pack_pending() == (left > 0)
        assert num_pending(pipeline) == left
        assert num_reserved(pipeline) < reserved
        reserved = num_reserved(pipeline)
    assert not pipeline.pack_pending()


def test_a_failed_step_counts_as_the_first_step(tiny: Path) -> None:
    pipeline = open_pipeline(tiny)
    context = context_of([1, 2, 3])
    context.tokens[1] = 1 << 40
    with pytest.raises(IndexError):
        step_logits(pipeline, [context])
    pipeline.release(context)
    logits(pipeline, 5)
    assert num_pending(pipeline) == 0


def test_small_models_are_packed_by_the_load(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert num_pending(open_pipeline(tiny)) == 0


def test_quantised_weights_are_packed_by_the_load(tiny: Path) -> None:
    for encoding in ("int8", "int4"):
        assert num_pending(open_pipeline(tiny, quantization_encoding=encoding)) == 0


def test_planning_counts_lazily_packed_weights(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.host.limits.memory", lambda: (1 << 30, 1 << 29))
    first = open_pipeline(tiny)
    devices, size = first.model.devices, num_reserved(first)
    assert size > 0
    other = InferenceSession()
    before = other.free_memory_of(devices)
    assert before <= (1 << 29) - size
    first.pack_all_pending()
    assert other.free_memory_of(devices) == before + size
