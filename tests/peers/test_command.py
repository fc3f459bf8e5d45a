"""The command `python -m benchmarks.peers`: checkpoints, encodings, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks.peers.__main__ import main
from benchmarks.peers.checkpoints import (
    checkpoint,
    converted_model,
    read_vocab_size,
    sentencepiece_model,
)
from benchmarks.peers.peers import DEFAULT_FOLDER, PEERS, interpreter_path, peer_environment
from penstock.errors import InputError

SHAPE = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 320,
    "dtype": "bfloat16",
}


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    path = tmp_path / "small"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPE))
    return path


def run_command(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_checkpoint_has_the_settings_that_peers_require_and_is_written_once(
    shape: Path, tmp_path: Path
) -> None:
    folder = checkpoint(str(shape), tmp_path / "checkpoints")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 8192
    assert read_vocab_size(folder) == 320
    modification_time = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoint(str(shape), tmp_path / "checkpoints") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == modification_time
    (folder / "complete").unlink()  # an interrupted run leaves a checkpoint without this file
    checkpoint(str(shape), tmp_path / "checkpoints")
    assert (folder / "model.safetensors").stat().st_mtime_ns > modification_time


def test_sentencepiece_model_begins_with_the_unknown_token() -> None:
    assert sentencepiece_model()[:16] == b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02"


def test_preloaded_library_is_in_the_virtual_environment() -> None:
    assert peer_environment(PEERS["vllm"], Path("/venvs"), 3) == {
        "OMP_NUM_THREADS": "3",
        "LD_PRELOAD": "/venvs/vllm/lib/libiomp5.so",
    }
    assert peer_environment(PEERS["llama_cpp"], Path("/venvs"), 2) == {"OMP_NUM_THREADS": "2"}


def test_unsupported_encodings_and_missing_virtual_environments_are_refused(tmp_path: Path) -> None:
    result = run_command("run", "vllm", "--encoding", "int8")
    assert result.exit_code == 2
    assert "vllm has no encoding to compare with int8; choose one of bfloat16 (bfloat16)" in result.output
    result = run_command("run", "max", "--encoding", "bfloat16")
    assert result.exit_code == 2
    assert (
        "max has no encoding to compare with bfloat16; choose one of float32 (float32), int4 (q4_k)"
        in result.output
    )
    result = run_command("run", "vllm", "--venvs", tmp_path)
    assert result.exit_code == 2
    assert "run `python -m benchmarks.peers setup vllm`" in result.output


def test_max_loads_the_checkpoint_or_the_gguf_file_of_llama_cpp(tmp_path: Path) -> None:
    peer, source = PEERS["max"], tmp_path / "checkpoint"
    source.mkdir()
    assert converted_model(peer, "float32", source, tmp_path) == source
    with pytest.raises(InputError, match=r"Q4_K_M.gguf does not exist, .* llama_cpp"):
        converted_model(peer, "q4_k", source, tmp_path)
    (source / "Q4_K_M.gguf").touch()
    (source / "bf16.gguf").touch()
    assert converted_model(peer, "q4_k", source, tmp_path) == source / "Q4_K_M.gguf"


@pytest.mark.peers
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PEERS)
def test_a_small_model_runs_on_a_real_peer(name: str, shape: Path, tmp_path: Path) -> None:
    if not interpreter_path(DEFAULT_FOLDER / name).exists():
        pytest.skip(f"{name} is not installed: python -m benchmarks.peers setup {name}")
    checkpoint = DEFAULT_FOLDER / "checkpoints" / shape.name
    encoding = next(iter(PEERS[name].encodings))
    words: list[str | Path] = ["run", name, "--shape", shape, "--encoding", encoding, "--pairs", "1"]
    words += ["--json", tmp_path / "out.json"]
    result = run_command(*words, "--works", "decode", "--works", "prefill", "--works", "batch")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["work"] for row in report["rows"]] == ["decode", "prefill", "batch"]
    assert report["versions"]["peer"][PEERS[name].package] == report["peer_version"]
    assert run_command("table", tmp_path / "out.json").output in result.output
    assert checkpoint.exists()
