"""Planning of the KV cache on a device with measured memory. A fake device returns the measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_steps import generate_tokens, make_context, open_pipeline
from support.tiny_llm import write_tiny_llm

from penstock.architectures import memory_profile
from penstock.errors import InsufficientMemoryError
from penstock.kernels import BACKENDS, DeviceMemory
from penstock.kernels import reference as reference_kernels
from penstock.kernels.reference import ReferenceOps
from penstock.memory import MemoryPlan

MIB = 1 << 20


class FakeDeviceMemory(DeviceMemory):
    """A device of `total` bytes. Weights use `weights` bytes, and each step uses `activations` bytes."""

    def __init__(self, total: int, weights: int, activations: int) -> None:
        self.total, self.weights, self.activations = total, weights, activations
        self.num_measurements = 0

    def free(self) -> int:
        return self.total - self.weights

    def peak(self, work: Callable[[], object]) -> int:
        work()
        self.num_measurements += 1
        if self.weights + self.activations > self.total:
            raise MemoryError("out of memory: tried to allocate 1 MiB")
        return self.activations


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


@contextmanager
def register_backend_with_memory(memory: FakeDeviceMemory) -> Iterator[None]:
    """Register the back end ``counted``: the reference kernels on a device with this memory."""
    backend = replace(
        reference_kernels.BACKEND, name="counted", priority=-1, memory=lambda ops, device: memory
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS._registered, "counted", backend)
        patch.setattr(
            "penstock.engine.InferenceSession.free_memory_of", classmethod(lambda cls, devices: memory.total)
        )
        yield


def make_memory_plan(checkpoint: Path, memory: FakeDeviceMemory, **config: Any) -> MemoryPlan:
    with register_backend_with_memory(memory):
        pipeline = open_pipeline(checkpoint, kernels="counted", **config)
        assert generate_tokens(pipeline, [make_context([1, 2, 3], 4)])[0]
        assert pipeline.kv.num_blocks == pipeline.memory_plan.num_blocks[0] - 1
        return pipeline.memory_plan


def test_the_cache_uses_the_memory_left_by_weights_and_activations(checkpoint: Path) -> None:
    plans = {}
    for activations in (1 * MIB, 4 * MIB):
        memory = FakeDeviceMemory(10 * MIB, 3 * MIB, activations)
        plan = plans[activations] = make_memory_plan(checkpoint, memory, max_batch_size=200)
        assert memory.num_measurements == 1
        assert (plan.weights_size, plan.activation_size) == (3 * MIB, activations)
        used_memory = plan.static_size + plan.kv_cache_size
        assert used_memory <= plan.available_memory == int(0.9 * memory.total)
        assert plan.available_memory - used_memory < plan.kv_cache_size // plan.num_blocks[0], (
            "another block would not fit"
        )
    assert plans[1 * MIB].num_blocks[0] > 2 * plans[4 * MIB].num_blocks[0]


def test_the_cache_is_limited_by_device_memory_utilization_and_kv_cache_memory(checkpoint: Path) -> None:
    memory = FakeDeviceMemory(10 * MIB, 3 * MIB, 1 * MIB)
    plan = make_memory_plan(checkpoint, memory, max_batch_size=200, device_memory_utilization=0.5)
    assert 0 <= 5 * MIB - plan.static_size - plan.kv_cache_size < plan.kv_cache_size // plan.num_blocks[0]
    plan = make_memory_plan(checkpoint, memory, kv_cache_memory=1 * MIB)
    assert plan.kv_cache_size <= 1 * MIB


def test_the_measured_step_is_the_largest_possible(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has the maximum number of tokens and of sequences, and it samples one token per sequence."""
    steps: list[tuple[int, int, int]] = []
    sampled_shapes: list[tuple[int, ...]] = []
    run, sample = memory_profile.run_largest_step, ReferenceOps.sample

    def run_and_record(model: Any, *arguments: Any) -> None:
        execute = model.execute

        def execute_and_record(inputs: Any) -> Any:
            lengths = inputs.row_offsets.diff()
            steps.append((len(inputs.tokens), len(lengths), int(lengths.max())))
            return execute(inputs)

        with monkeypatch.context() as patch:
            patch.setattr(model, "execute", execute_and_record)
            patch.setattr(ReferenceOps, "sample", sample_and_record)
            run(model, *arguments)

    def sample_and_record(self: Any, logits: Any, *arguments: Any) -> Any:
        sampled_shapes.append(tuple(logits.shape))
        return sample(self, logits, *arguments)

    monkeypatch.setattr(memory_profile, "run_largest_step", run_and_record)
    memory = FakeDeviceMemory(64 * MIB, 3 * MIB, 1 * MIB)
    make_memory_plan(checkpoint, memory, max_batch_size=20, max_batch_input_tokens=1000)
    assert steps == [(1000, 20, 50)]
    assert sampled_shapes == [(20, 259)]
    make_memory_plan(checkpoint, memory, max_batch_size=2, max_batch_input_tokens=1000)
    assert steps[1] == (2 * 128, 2, 128), "no sequence is longer than the maximum length"


def test_steps_and_weights_that_exceed_the_memory_are_refused(checkpoint: Path) -> None:
    with pytest.raises(InsufficientMemoryError, match=r"a step of 1024 tokens .*--max-batch-input-tokens"):
        make_memory_plan(checkpoint, FakeDeviceMemory(10 * MIB, 3 * MIB, 8 * MIB))
    with pytest.raises(InsufficientMemoryError, match="weights take"):
        make_memory_plan(checkpoint, FakeDeviceMemory(10 * MIB, 9 * MIB + 1, 0))
