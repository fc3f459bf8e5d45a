"""Memory that is found ahead: whose it is, when it goes back, and what a load does with it."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.random_draws import examples

from penstock import LLM, SamplingParams, assembly
from penstock.architectures.decoder import DecoderModel
from penstock.bench.random_weights import write_random_checkpoint
from penstock.driver import CPU
from penstock.engine import InferenceSession
from penstock.errors import CheckpointError, WeightsError
from penstock.host import memory as host_memory
from penstock.host.memory import (
    PrefaultedBuffer,
    allocate_prefaulted,
    num_prefaulted,
    prefaulted_memory,
    release_prefaulted,
)
from penstock.kernels.cpu import available_isas
from penstock.kernels.reference import ReferenceOps
from penstock.memory import estimate_packed_size, estimate_weights_size
from penstock.pipelines import PIPELINE_REGISTRY, PipelineConfig

MB = 1 << 20
PROMPT = [1, 5, 9, 3, 7, 2]
QUANTIZED = {"quantization_encoding": "int8"}
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True, detokenize=False)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def tiny_config(name: str) -> dict[str, Any]:
    (architecture,) = (one for one in PIPELINE_REGISTRY.architectures if one.name == name)
    assert architecture.tiny_config is not None
    return dict(architecture.tiny_config())


def searching() -> bool:
    return any(thread.name == "penstock-memory" for thread in threading.enumerate())


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.integers(0, 3 * MB), max_size=12), st.integers(1, 8 * MB))
def test_what_is_taken_is_apart_and_stays(sizes: list[int], most: int) -> None:
    ahead = PrefaultedBuffer(most)
    taken = []
    for index, size in enumerate(sizes):
        memory = ahead.take(size)
        if memory is None:
            continue
        assert len(memory) == size
        assert memory.ctypes.data % 64 == 0
        memory[:] = index + 1
        taken.append((index + 1, memory))
    ahead.close()
    assert ahead.take(1) is None
    assert ahead.num_idle == 0
    for number, memory in taken:
        assert (memory == number).all(), "somebody else wrote there, or it was given back"
    starts = sorted((memory.ctypes.data, len(memory)) for _, memory in taken if len(memory))
    assert all(start + size <= after for (start, size), (after, _) in pairwise(starts))


def test_all_of_it_is_found_where_nobody_asks_and_given_back() -> None:
    gc.collect()  # what other tests have left would go in the middle of it
    before = resident()
    ahead = PrefaultedBuffer(256 * MB)
    ahead._thread.join()
    assert 256 * MB <= ahead.num_idle <= 258 * MB
    assert resident() - before > 250 * MB
    memory = ahead.take(100 * MB + 1)
    assert memory is not None
    assert 156 * MB - 64 <= ahead.num_idle <= 158 * MB
    ahead.close()
    assert 90 * MB < resident() - before < 110 * MB, "what nobody has taken goes back, all else stays"
    del memory, ahead
    assert resident() - before < 10 * MB


def test_taking_ends_the_search() -> None:
    ahead = PrefaultedBuffer(4096 * MB)
    first = ahead.take(64)
    assert not ahead._thread.is_alive()
    assert ahead.num_idle < 4096 * MB - 64
    ahead.close()
    assert first is not None


def test_one_load_at_a_time_has_any() -> None:
    assert allocate_prefaulted(1) is None
    with prefaulted_memory(0):
        assert allocate_prefaulted(1) is None
        with prefaulted_memory(4 * MB):
            with prefaulted_memory(64 * MB):
                assert allocate_prefaulted(8 * MB) is None, "the first one's"
            assert allocate_prefaulted(MB) is not None, "which the second one's end has left alone"
            release_prefaulted()
            assert allocate_prefaulted(1) is None
    with pytest.raises(ValueError), prefaulted_memory(64 * MB):  # noqa: PT011  # whichever
        raise ValueError
    assert allocate_prefaulted(1) is None
    assert not searching()


def test_what_cannot_be_mapped_is_done_without() -> None:
    with prefaulted_memory(1 << 60):  # more than there are addresses for
        assert allocate_prefaulted(1) is None
    assert not searching()


def test_what_is_found_ahead_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_reservations", WeakSet())  # those of other tests
    monkeypatch.setattr("penstock.host.limits.memory", lambda: (8 * MB, 2 * MB))
    with prefaulted_memory(3 * MB):
        assert host_memory._prefaulted is not None
        host_memory._prefaulted._thread.join()
        assert 3 * MB <= num_prefaulted() <= 6 * MB
        assert CPU().stats == {"total_memory": 8 * MB, "free_memory": 2 * MB + num_prefaulted()}
        assert allocate_prefaulted(3 * MB) is not None
    assert num_prefaulted() == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("ahead"), tiny_config("llama"))


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much loads have found ahead, of models of any size from now on."""
    found: list[int] = []

    @contextmanager
    def watched(num_bytes: int) -> Iterator[None]:
        found.append(num_bytes)
        with prefaulted_memory(num_bytes):
            yield

    monkeypatch.setattr(assembly, "_MIN_PREFAULTED", 0)
    monkeypatch.setattr(assembly, "prefaulted_memory", watched)
    return found


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What has been taken of that."""
    taken: list[int] = []
    take = PrefaultedBuffer.take

    def watched(ahead: PrefaultedBuffer, num_bytes: int) -> object:
        memory = take(ahead, num_bytes)
        taken.append(0 if memory is None else num_bytes)
        return memory

    monkeypatch.setattr(PrefaultedBuffer, "take", watched)
    return taken


needs_kernels = pytest.mark.skipif(not available_isas(), reason="the C++ kernels are not built")


@needs_kernels
@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_weights_are_packed_into_what_was_found(
    tiny: Path, sizes: list[int], takes: list[int], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate() -> list[int]:
        with LLM(str(tiny), quantization_encoding=encoding) as llm:
            assert allocate_prefaulted(1) is None, "the load is over"
            return llm.generate(PROMPT, GREEDY)[0].token_ids

    found = generate()
    assert sum(takes) > 0.9 * sizes[0] > 0
    del takes[:]
    monkeypatch.setattr(assembly, "_PREFAULT_SHARE", 0.0)  # no room for it
    assert generate() == found
    assert sizes[1:] == [0]
    assert not takes


@needs_kernels
def test_a_worker_finds_it_too(tiny: Path, sizes: list[int], takes: list[int]) -> None:
    assembly.load_work(PipelineConfig.from_flat({"model_path": str(tiny), **QUANTIZED}))
    assert sum(takes) > 0.9 * sizes[0] > 0


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
def test_nothing_is_found_for_weights_that_are_packed_later(
    tiny: Path, sizes: list[int], encoding: str
) -> None:
    LLM(str(tiny), quantization_encoding=encoding).close()
    assert sizes == [0]


@needs_kernels
def test_nothing_is_found_for_weights_that_are_packed(
    tiny: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = PipelineConfig.from_flat({"model_path": str(tiny), **QUANTIZED})
    file = assembly.pack_checkpoint(config)
    LLM(str(tiny), **QUANTIZED).close()
    assert sizes == [0]
    file.unlink()
    LLM(str(tiny), **QUANTIZED).close()
    assert sizes[1] > 0


def test_what_packs_nothing_gives_it_back(
    tiny: Path, sizes: list[int], takes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InferenceSession, "ops", ReferenceOps())
    read, during = DecoderModel.read.__func__, []  # type: ignore[attr-defined]

    def watched(cls: type[DecoderModel], *arguments: object) -> object:
        during.append(host_memory._prefaulted)
        return read(cls, *arguments)

    monkeypatch.setattr(DecoderModel, "read", classmethod(watched))
    LLM(str(tiny), **QUANTIZED).close()
    assert sizes[0] > 0
    assert during == [None]
    assert not takes


def test_a_load_that_fails_gives_it_back(tiny: Path, sizes: list[int], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        LLM(str(broken), **QUANTIZED)
    assert sizes[0] > 0
    assert allocate_prefaulted(1) is None
    assert not searching()
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path / "absent"), **QUANTIZED)
    assert sizes[1:] == [0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_the_size_is_foretold(tmp_path: Path, encoding: str, tied: bool) -> None:
    """Of layers that are no smaller than theirs are in a model worth it."""
    wide = tiny_config("llama") | {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 1024,
        "tie_word_embeddings": tied,
    }
    checkpoint = write_random_checkpoint(tmp_path, wide)
    config = PipelineConfig.from_flat({"model_path": str(checkpoint), "quantization_encoding": encoding})
    table = 1024 * 256 * (4 if encoding == "float32" else 2)
    packed = estimate_weights_size(config) - table
    assert estimate_packed_size(config) == pytest.approx(packed, rel=0.25 if encoding == "int4" else 0.1)
