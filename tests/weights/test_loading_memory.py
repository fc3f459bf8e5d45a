"""Peak memory of loading a checkpoint: close to the size of its packed weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.pipeline_steps import generate_tokens, make_context, open_pipeline

from penstock.bench.random_weights import SHAPES, write_random_checkpoint
from penstock.weights import Weights
from penstock.weights.mapping import drop_pages

PROCESS_STATUS = Path("/proc/self/status")
pytestmark = pytest.mark.skipif(not PROCESS_STATUS.is_file(), reason="the system has no /proc/self/status")

CONFIG = {**SHAPES["l110m"], "num_hidden_layers": 8, "vocab_size": 4096}
MIB = 1 << 20


def resident_bytes(field: str) -> int:
    """Return the resident bytes of this process: ``RssAnon`` (anonymous) or ``RssFile`` (mapped files)."""
    line = next(line for line in PROCESS_STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("memory"), CONFIG)


@pytest.mark.parametrize("encoding", ["bfloat16", "int8", "int4"])
def test_peak_memory_is_close_to_the_packed_size(
    checkpoint: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_length": 64, "max_batch_size": 1, "kv_cache_memory": 8 * MIB, "num_threads": 1}
    # Loading a first model loads the libraries, which allocate memory once.
    generate_tokens(open_pipeline("demo", **options), [make_context([1, 2], 2)])
    anonymous_bytes, file_bytes, original_release = (
        [resident_bytes("RssAnon")],
        [resident_bytes("RssFile")],
        Weights.release,
    )

    def record_and_release(weights: Weights, name: str) -> None:
        anonymous_bytes.append(resident_bytes("RssAnon"))
        file_bytes.append(resident_bytes("RssFile"))
        original_release(weights, name)

    monkeypatch.setattr(Weights, "release", record_and_release)
    pipeline = open_pipeline(checkpoint, quantization_encoding=encoding, **options)
    file_bytes.append(resident_bytes("RssFile"))
    generate_tokens(pipeline, [make_context([1, 2], 3)])
    packed_size = pipeline.model.estimate_weights_size(pipeline.model.pipeline_config)
    assert len(anonymous_bytes) > 40, "the memory must be measured at each release of a tensor"
    assert file_bytes[-1] - file_bytes[0] < 24 * MIB, "mapped pages of the file must be released"
    if encoding == "bfloat16":  # the first step uses mapped rows; packed panels replace them layer by layer
        assert max(file_bytes) - file_bytes[0] > 0.5 * packed_size
        assert (
            max(map(sum, zip(anonymous_bytes, file_bytes, strict=False)))
            < anonymous_bytes[0] + file_bytes[0] + 1.15 * packed_size + 24 * MIB
        )
    else:
        assert max(file_bytes) - file_bytes[0] < 24 * MIB
        assert max(anonymous_bytes) - anonymous_bytes[0] < 1.15 * packed_size + 24 * MIB


def test_released_pages_are_read_from_the_file_again(tmp_path: Path) -> None:
    values = torch.arange(3 * MIB, dtype=torch.int32).view(3, MIB)
    save_file({"a": values.float(), "b": torch.ones(7)}, tmp_path / "model.safetensors")
    weights = Weights.open(tmp_path / "model.safetensors")
    tensor, small_tensor = weights.tensor("a", (3, MIB)), weights.tensor("b", (7,))
    assert float(tensor.sum()) > 0
    bytes_before = resident_bytes("RssFile")
    weights.release("a")
    weights.release("a")
    weights.release("no such tensor")
    assert bytes_before - resident_bytes("RssFile") > 10 * MIB
    assert torch.equal(tensor, values.float())
    assert torch.equal(small_tensor, torch.ones(7))


def test_tensors_smaller_than_a_page_are_not_dropped() -> None:
    numbers = torch.ones(8)
    drop_pages(numbers)
    assert torch.equal(numbers, torch.ones(8))


def test_anonymous_memory_is_not_dropped() -> None:
    numbers = torch.arange(1 << 20)
    drop_pages(numbers)
    assert torch.equal(numbers, torch.arange(1 << 20))
