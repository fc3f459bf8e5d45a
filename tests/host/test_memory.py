"""Prefaulted memory: allocation, return to the system, and use while a model is loaded.

Further tests check the estimate of the packed size of a model, and reservations of memory.
"""

from __future__ import annotations

import gc
import shutil
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.checkpoints import DECODERS, make_tiny_config
from support.random_draws import num_examples

from penstock import LLM, SamplingParams, assembly
from penstock.architectures.decoder import DecoderModel
from penstock.bench.random_weights import write_random_checkpoint
from penstock.driver import CPU
from penstock.engine import InferenceSession
from penstock.errors import CheckpointError, WeightsError
from penstock.host.memory import MemoryReservations, PrefaultedBuffer, PrefaultedMemory
from penstock.kernels.cpu import available_isas
from penstock.kernels.reference import ReferenceOps
from penstock.memory import estimate_packed_size, estimate_weights_size
from penstock.pipelines import PipelineConfig

MB = 1 << 20
PROMPT = [1, 5, 9, 3, 7, 2]
INT8 = {"quantization_encoding": "int8"}
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True, detokenize=False)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def is_prefaulting() -> bool:
    return any(thread.name == "penstock-memory" for thread in threading.enumerate())


@settings(deadline=None, max_examples=num_examples(30))
@given(st.lists(st.integers(0, 3 * MB), max_size=12), st.integers(1, 8 * MB))
def test_allocations_are_disjoint_and_keep_their_contents(sizes: list[int], total: int) -> None:
    buffer = PrefaultedBuffer(total)
    allocated = []
    for index, size in enumerate(sizes):
        memory = buffer.allocate(size)
        if memory is None:
            continue
        assert len(memory) == size
        assert memory.ctypes.data % 64 == 0
        memory[:] = index + 1
        allocated.append((index + 1, memory))
    buffer.close()
    assert buffer.allocate(1) is None
    assert buffer.num_idle == 0
    for value, memory in allocated:
        assert (memory == value).all(), "an allocation was overwritten or returned to the system"
    starts = sorted((memory.ctypes.data, len(memory)) for _, memory in allocated if len(memory))
    assert all(start + size <= next_start for (start, size), (next_start, _) in pairwise(starts))


def test_the_whole_buffer_is_prefaulted_and_unallocated_memory_is_returned() -> None:
    gc.collect()  # garbage of other tests that is freed later would change the measurement
    bytes_before = resident_bytes()
    buffer = PrefaultedBuffer(256 * MB)
    buffer._thread.join()
    assert 256 * MB <= buffer.num_idle <= 258 * MB
    assert resident_bytes() - bytes_before > 250 * MB
    memory = buffer.allocate(100 * MB + 1)
    assert memory is not None
    assert 156 * MB - 64 <= buffer.num_idle <= 158 * MB
    buffer.close()
    assert 90 * MB < resident_bytes() - bytes_before < 110 * MB, "only unallocated memory is returned"
    del memory, buffer
    assert resident_bytes() - bytes_before < 10 * MB


def test_the_first_allocation_stops_the_prefaulting_thread() -> None:
    buffer = PrefaultedBuffer(4096 * MB)
    memory = buffer.allocate(64)
    assert not buffer._thread.is_alive()
    assert buffer.num_idle < 4096 * MB - 64
    buffer.close()
    assert memory is not None


def test_each_load_has_its_own_memory() -> None:
    with PrefaultedMemory() as empty_memory, PrefaultedMemory(4 * MB) as small_memory:
        assert empty_memory.allocate(1) is None
        with PrefaultedMemory(64 * MB) as large_memory:
            assert small_memory.allocate(8 * MB) is None, (
                "too large for this memory; the memory of another load is not used"
            )
            assert large_memory.allocate(8 * MB) is not None
        assert large_memory.allocate(1) is None
        assert small_memory.allocate(MB) is not None, "the end of another load does not release this memory"
        small_memory.release()
        assert small_memory.allocate(1) is None
    memory = PrefaultedMemory(64 * MB)
    with pytest.raises(ValueError), memory:  # noqa: PT011  # any error
        raise ValueError
    assert memory.allocate(1) is None
    assert not is_prefaulting()


def test_no_memory_is_prefaulted_if_the_system_refuses_the_mapping() -> None:
    with PrefaultedMemory(1 << 60) as memory:  # larger than the address space
        assert memory.allocate(1) is None
        assert memory.num_idle == 0
    assert not is_prefaulting()


def test_the_planner_counts_prefaulted_memory_as_free(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.host.limits.memory", lambda: (1 << 30, 1 << 29))
    config = PipelineConfig.from_flat({"model_path": str(tiny_checkpoint)})
    (architecture,) = (decoder for decoder in DECODERS if decoder.name == "llama")
    with PrefaultedMemory(3 * MB) as memory:
        assert memory._buffer is not None
        memory._buffer._thread.join()
        assert 3 * MB <= memory.num_idle <= 6 * MB
        model = architecture.load_pipeline_model()(config, InferenceSession([CPU()], prefaulted=memory))
        assert CPU().stats == {"total_memory": 1 << 30, "free_memory": 1 << 29}
        # `free_memory_of` excludes memory that sessions of other tests have reserved.
        free_memory = InferenceSession.free_memory_of([CPU()])
        assert model._free_memory(0) == free_memory + memory.num_idle


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), make_tiny_config("llama"))


@pytest.fixture
def prefaulted_memories(monkeypatch: pytest.MonkeyPatch) -> list[PrefaultedMemory]:
    """Enable prefaulting for small models. Return a list that receives the prefaulted memory of each load."""
    memories: list[PrefaultedMemory] = []

    class RecordedMemory(PrefaultedMemory):
        def __init__(self, num_bytes: int = 0) -> None:
            super().__init__(num_bytes)
            self.size = num_bytes
            memories.append(self)

    monkeypatch.setattr(assembly, "_MIN_PREFAULTED", 0)
    monkeypatch.setattr(assembly, "PrefaultedMemory", RecordedMemory)
    return memories


def prefaulted_sizes(prefaulted_memories: list[PrefaultedMemory]) -> list[int]:
    return [vars(memory)["size"] for memory in prefaulted_memories]


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the size of each allocation from prefaulted memory; 0 if it did not fit."""
    sizes: list[int] = []
    allocate = PrefaultedBuffer.allocate

    def record_size(buffer: PrefaultedBuffer, num_bytes: int) -> object:
        memory = allocate(buffer, num_bytes)
        sizes.append(0 if memory is None else num_bytes)
        return memory

    monkeypatch.setattr(PrefaultedBuffer, "allocate", record_size)
    return sizes


needs_kernels = pytest.mark.skipif(not available_isas(), reason="the C++ kernels are not built")


@needs_kernels
@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_weights_are_packed_into_prefaulted_memory(
    tiny_checkpoint: Path,
    prefaulted_memories: list[PrefaultedMemory],
    allocations: list[int],
    encoding: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def generate() -> list[int]:
        with LLM(str(tiny_checkpoint), quantization_encoding=encoding) as llm:
            assert prefaulted_memories[-1].allocate(1) is None, "no memory can be allocated after the load"
            assert llm.pipeline.session.prefaulted is prefaulted_memories[-1]
            return llm.generate(PROMPT, GREEDY)[0].token_ids

    expected = generate()
    assert sum(allocations) > 0.9 * prefaulted_sizes(prefaulted_memories)[0] > 0
    allocations.clear()
    monkeypatch.setattr(assembly, "_PREFAULT_SHARE", 0.0)  # too little free memory
    assert generate() == expected
    assert prefaulted_sizes(prefaulted_memories)[1:] == [0]
    assert not allocations


@needs_kernels
def test_a_worker_prefaults_memory(
    tiny_checkpoint: Path, prefaulted_memories: list[PrefaultedMemory], allocations: list[int]
) -> None:
    assembly.load_runtime(PipelineConfig.from_flat({"model_path": str(tiny_checkpoint), **INT8}))
    assert sum(allocations) > 0.9 * prefaulted_sizes(prefaulted_memories)[0] > 0


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
def test_no_memory_is_prefaulted_for_lazily_packed_weights(
    tiny_checkpoint: Path, prefaulted_memories: list[PrefaultedMemory], encoding: str
) -> None:
    LLM(str(tiny_checkpoint), quantization_encoding=encoding).close()
    assert prefaulted_sizes(prefaulted_memories) == [0]


def test_no_memory_is_prefaulted_for_a_back_end_that_packs_no_weights(
    tiny_checkpoint: Path, prefaulted_memories: list[PrefaultedMemory]
) -> None:
    LLM(str(tiny_checkpoint), kernels="reference", **INT8).close()
    assert prefaulted_sizes(prefaulted_memories) == [0]


@needs_kernels
def test_no_memory_is_prefaulted_for_weights_from_a_packed_file(
    tiny_checkpoint: Path,
    prefaulted_memories: list[PrefaultedMemory],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = PipelineConfig.from_flat({"model_path": str(tiny_checkpoint), **INT8})
    file = assembly.pack_checkpoint(config)
    LLM(str(tiny_checkpoint), **INT8).close()
    assert prefaulted_sizes(prefaulted_memories) == [0]
    file.unlink()
    LLM(str(tiny_checkpoint), **INT8).close()
    assert prefaulted_sizes(prefaulted_memories)[1] > 0


def test_memory_is_released_before_weights_are_read_if_no_weight_is_packed(
    tiny_checkpoint: Path,
    prefaulted_memories: list[PrefaultedMemory],
    allocations: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InferenceSession, "ops", ReferenceOps())
    original_read, buffers_during_read = DecoderModel.read.__func__, []  # type: ignore[attr-defined]

    def record_buffer(cls: type[DecoderModel], *arguments: object) -> object:
        buffers_during_read.append(prefaulted_memories[0]._buffer)
        return original_read(cls, *arguments)

    monkeypatch.setattr(DecoderModel, "read", classmethod(record_buffer))
    LLM(str(tiny_checkpoint), **INT8).close()
    assert prefaulted_sizes(prefaulted_memories)[0] > 0
    assert buffers_during_read == [None]
    assert not allocations


def test_a_failed_load_releases_its_prefaulted_memory(
    tiny_checkpoint: Path, prefaulted_memories: list[PrefaultedMemory], tmp_path: Path
) -> None:
    broken_folder = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, broken_folder)
    tensors = load_file(broken_folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, broken_folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        LLM(str(broken_folder), **INT8)
    assert prefaulted_sizes(prefaulted_memories)[0] > 0
    assert prefaulted_memories[0].allocate(1) is None
    assert not is_prefaulting()
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path / "absent"), **INT8)
    assert prefaulted_sizes(prefaulted_memories)[1:] == [0]


@pytest.mark.parametrize("has_tied_embeddings", [True, False])
@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_the_estimated_packed_size_is_close_to_the_actual_size(
    tmp_path: Path, encoding: str, has_tied_embeddings: bool
) -> None:
    """The layers are larger than those of the tiny model, so that padding is a small part of their size."""
    model_config = make_tiny_config("llama") | {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 1024,
        "tie_word_embeddings": has_tied_embeddings,
    }
    checkpoint = write_random_checkpoint(tmp_path, model_config)
    config = PipelineConfig.from_flat({"model_path": str(checkpoint), "quantization_encoding": encoding})
    embedding_size = 1024 * 256 * (4 if encoding == "float32" else 2)
    actual_size = estimate_weights_size(config) - embedding_size
    assert estimate_packed_size(config) == pytest.approx(actual_size, rel=0.25 if encoding == "int4" else 0.1)


def test_a_reservation_lasts_until_it_is_ended_or_deleted() -> None:
    reservations = MemoryReservations()
    ended_reservation, deleted_reservation = reservations.reserve(3 * MB), reservations.reserve(4 * MB)
    assert reservations.num_bytes == 7 * MB
    ended_reservation.end()
    assert reservations.num_bytes == 4 * MB
    assert deleted_reservation.num_bytes == 4 * MB
    del deleted_reservation
    assert reservations.num_bytes == 0
    assert MemoryReservations().num_bytes == 0
