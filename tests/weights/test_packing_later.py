"""Lazy packing of float weights: the first step, with unpacked weights, gives the logits of later steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make_tiny_config, write_checkpoint
from support.pipeline_steps import generate_tokens, make_context, open_pipeline, random_tokens, step_logits

from penstock.engine import InferenceSession
from penstock.kernels.cpu import available_isas
from penstock.pipelines import TextGenerationPipeline
from penstock.weights import lazy_packing

pytestmark = pytest.mark.skipif(not available_isas(), reason="the C++ kernels are not built")


@pytest.fixture(autouse=True)
def _small_models_are_packed_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_packing, "MIN_LAZY_BYTES", 0)


ARCHITECTURE_NAMES = ["llama", "gpt2", "qwen2", "gemma2", "qwen3_moe"]


def write_architecture_checkpoint(name: str, folder: Path) -> Path:
    return write_checkpoint(folder, make_tiny_config(name))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_architecture_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def num_pending(pipeline: TextGenerationPipeline) -> int:
    model: Any = pipeline.model
    return int(model.lazy_packing.num_pending)


def reserved_bytes(pipeline: TextGenerationPipeline) -> int:
    return pipeline.session.reservations.num_bytes


def compute_logits(pipeline: TextGenerationPipeline, num_tokens: int) -> torch.Tensor:
    context = make_context(random_tokens(num_tokens, 130, seed=num_tokens))
    (logits,) = step_logits(pipeline, [context])
    pipeline.release(context)
    return logits


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURE_NAMES)
def test_logits_of_the_first_step_equal_those_of_later_steps(
    name: str, encoding: str, tmp_path: Path
) -> None:
    checkpoint = write_architecture_checkpoint(name, tmp_path / name)
    pipeline = open_pipeline(checkpoint, quantization_encoding=encoding, enable_prefix_caching=False)
    num_pending_before = num_pending(pipeline)
    first_logits = compute_logits(pipeline, 40)
    assert num_pending(pipeline) <= num_pending_before
    second_logits = compute_logits(pipeline, 40)
    assert num_pending(pipeline) == 0
    assert torch.equal(first_logits, second_logits)
    if name == "llama":
        assert num_pending_before > 4


def test_tokens_equal_those_of_a_packed_model(llama: Path) -> None:
    prompts = [random_tokens(n, 130, seed=n) for n in (3, 50, 17)]

    def generate_for_prompts(pipeline: TextGenerationPipeline) -> list[list[int]]:
        return generate_tokens(pipeline, [make_context(prompt, 12) for prompt in prompts])

    packed_pipeline = open_pipeline(llama, quantization_encoding="bfloat16")
    packed_pipeline.pack_all_pending()
    assert generate_for_prompts(
        open_pipeline(llama, quantization_encoding="bfloat16")
    ) == generate_for_prompts(packed_pipeline)


def test_each_call_of_pack_pending_packs_one_weight(llama: Path) -> None:
    pipeline = open_pipeline(llama)
    reserved_before, num_pending_before = reserved_bytes(pipeline), num_pending(pipeline)
    for num_remaining in range(num_pending_before - 1, -1, -1):
        assert pipeline.model.pack_pending() == (num_remaining > 0)
        assert num_pending(pipeline) == num_remaining
        assert reserved_bytes(pipeline) < reserved_before
        reserved_before = reserved_bytes(pipeline)
    assert not pipeline.model.pack_pending()


def test_a_failed_step_counts_as_the_first_step(llama: Path) -> None:
    pipeline = open_pipeline(llama)
    context = make_context([1, 2, 3])
    context.tokens[1] = 1 << 40
    with pytest.raises(IndexError):
        step_logits(pipeline, [context])
    pipeline.release(context)
    compute_logits(pipeline, 5)
    assert num_pending(pipeline) == 0


def test_small_models_are_packed_at_load(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert num_pending(open_pipeline(llama)) == 0


def test_quantized_weights_are_packed_at_load(llama: Path) -> None:
    for encoding in ("int8", "int4"):
        assert num_pending(open_pipeline(llama, quantization_encoding=encoding)) == 0


def test_free_memory_excludes_pending_weights(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.host.limits.memory", lambda: (1 << 30, 1 << 29))
    pipeline = open_pipeline(llama)
    devices, pending_bytes = pipeline.model.devices, reserved_bytes(pipeline)
    assert pending_bytes > 0
    session = InferenceSession()
    free_before = session.free_memory_of(devices)
    assert free_before <= (1 << 29) - pending_bytes
    pipeline.pack_all_pending()
    assert session.free_memory_of(devices) == free_before + pending_bytes
