"""``penstock warm-cache``: it accepts complete checkpoints, and reports incomplete ones before loading."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file
from support.checkpoints import DECODERS, make_tiny_config, write_checkpoint
from support.gguf_files import GGMLQuantizationType, tokenizer_metadata, write_gguf
from support.tiny_embedder import write_tiny_embedder
from support.tiny_llm import write_tiny_llm

from penstock import LLM
from penstock.cli import cli
from penstock.kernels.cpu import available_isas
from penstock.weights import tensors as loading


def warm_cache(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["warm-cache", *map(str, arguments)])


def read_report(*arguments: object) -> dict[str, Any]:
    """Return the JSON that the command prints."""
    result = warm_cache(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    actual: dict[str, Any] = json.loads(result.stdout)
    return actual


def assert_refused(expected_message: str, *arguments: object) -> None:
    """Check that the command fails with one line that contains ``expected_message``."""
    result = warm_cache(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("penstock: error: ")
    assert result.stderr.count("\n") == 1
    assert re.search(expected_message, result.stderr), result.stderr


def change_tensors(folder: Path, *dropped_names: str, **added_tensors: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in dropped_names} | added_tensors, file
    )


def test_the_demo_model_is_complete() -> None:
    result = warm_cache()
    assert result.exit_code == 0, result.stderr
    assert "llama, bfloat16" in result.stdout
    assert "2,048 tokens, with a chat template" in result.stdout
    assert "checksums" not in result.stdout


def test_the_json_report_has_the_tensors_and_sizes(tmp_path: Path) -> None:
    folder = write_tiny_llm(tmp_path / "tiny", chat=False)
    (model,) = read_report("--model", folder)["models"]
    assert model["architecture"] == "llama"
    assert model["encoding"] == "float32"
    assert not model["has_chat_template"]
    assert model["num_tensors"] == len(load_file(folder / "model.safetensors"))
    assert model["num_bytes"] == sum(
        tensor.nbytes for tensor in load_file(folder / "model.safetensors").values()
    )


@pytest.mark.skipif(not available_isas(), reason="the C++ kernels are not built")
def test_weights_are_packed_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_tiny_llm(tmp_path / "tiny")
    assert "packed" not in read_report("--model", folder)["models"][0]
    result = warm_cache("--model", folder, "--quantization-encoding", "int8", "--pack")
    assert re.search(r"packed +0\.\d MiB in .*/cache/penstock/packed/tiny-int8-", result.stdout)
    (model,) = read_report("--model", folder, "--pack")["models"]
    assert Path(model["packed"]).stat().st_size == model["num_packed_bytes"]
    assert len(list((tmp_path / "cache" / "penstock" / "packed").iterdir())) == 2, (
        "one file for each encoding"
    )


@pytest.mark.parametrize("name", [candidate.name for candidate in DECODERS])
def test_every_decoder_architecture_can_be_checked(name: str, tmp_path: Path) -> None:
    (architecture,) = (candidate for candidate in DECODERS if candidate.name == name)
    assert architecture.tiny_config is not None
    folder = write_checkpoint(write_tiny_llm(tmp_path / "tiny"), architecture.tiny_config())
    (model,) = read_report("--model", folder)["models"]
    assert model["architecture"] == name


def test_an_embeddings_model_is_checked_and_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_tiny_embedder(tmp_path / "tiny", labels=2)
    flags = ("--quantization-encoding", "int8") + (("--pack",) if available_isas() else ())
    (model,) = read_report("--model", folder, *flags)["models"]
    assert model["architecture"] == "bert"
    tensors = load_file(folder / "model.safetensors")
    with LLM(str(folder), quantization_encoding="int8") as llm:
        assert llm.classify("cat")[0].scores.shape == (2,)
    change_tensors(folder, "classifier.bias", surplus=tensors["classifier.bias"])
    assert_refused(r"classifier\.bias", "--model", folder)


def test_the_error_names_all_invalid_tensors(tmp_path: Path) -> None:
    folder = write_tiny_llm(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    change_tensors(folder, "model.norm.weight", surplus=tensors["model.norm.weight"])
    change_tensors(folder, "lm_head.weight", **{"lm_head.weight": tensors["lm_head.weight"][:-1]})
    assert_refused(r"1 missing: model.norm.weight; 1 misshapen: lm_head.*surplus", "--model", folder)


@pytest.mark.parametrize(
    ("damage_checkpoint", "expected_message"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (lambda folder: os.truncate(folder / "model.safetensors", 9000), "truncated"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "nonesuch"}'),
            "architecture 'nonesuch' is not known",
        ),
    ],
)
def test_checkpoints_that_cannot_be_loaded_are_refused(
    damage_checkpoint: Callable[[Path], object], expected_message: str, tmp_path: Path
) -> None:
    folder = write_tiny_llm(tmp_path / "tiny")
    damage_checkpoint(folder)
    assert_refused(expected_message, "--model", folder)


def test_an_unsupported_encoding_is_refused() -> None:
    assert_refused("int7", "--quantization-encoding", "int7")


def test_the_draft_model_and_the_adapters_are_checked(tmp_path: Path) -> None:
    draft = write_tiny_llm(tmp_path / "draft", num_hidden_layers=1)
    target = write_tiny_llm(tmp_path / "tiny")
    flags = ("--model", target, "--draft-model-path", draft)
    assert [entry["model"] for entry in read_report(*flags)["models"]] == [str(target), str(draft)]
    (draft / "tokenizer.json").unlink()
    assert_refused("draft", *flags)
    assert_refused("no such folder", "--model", target, "--lora", f"tone={tmp_path / 'nowhere'}")


def test_a_snapshot_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    """The snapshot has the layout of the Hub's cache: links to blobs that are named by their hash."""
    folder = write_tiny_llm(tmp_path / "snapshots" / "main")
    weights = folder / "model.safetensors"
    weights_blob = tmp_path / "blobs" / hashlib.sha256(weights.read_bytes()).hexdigest()
    weights_blob.parent.mkdir()
    weights.rename(weights_blob)
    weights.symlink_to(weights_blob)
    config_blob = tmp_path / "blobs" / ("0" * 40)
    (folder / "config.json").rename(config_blob)
    (folder / "config.json").symlink_to(config_blob)
    assert read_report("--model", folder, "--checksums")["models"][0]["num_checksums"] == 1
    assert "1 files match the hub" in warm_cache("--model", folder, "--checksums").stdout
    data = bytearray(weights_blob.read_bytes())
    data[-1] ^= 1
    weights_blob.write_bytes(data)
    assert warm_cache("--model", folder).exit_code == 0, (
        "without --checksums, only names and shapes are checked"
    )
    assert_refused("is damaged: its SHA-256", "--model", folder, "--checksums")


def test_print_config_shows_the_settings(tmp_path: Path) -> None:
    result = warm_cache("--print-config", "--max-length", "77", "--model", tmp_path / "nowhere")
    assert result.exit_code == 0
    assert [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("max_length")] == [
        ["77", "flag"]
    ]


def test_a_gguf_file_is_checked(tmp_path: Path) -> None:
    checkpoint = write_tiny_llm(tmp_path / "tiny")
    tokens = tokenizer_metadata(json.loads((checkpoint / "tokenizer.json").read_text()), "gpt-2")
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0, tokens)
    (model,) = read_report("--model", file)["models"]
    assert model["checkpoint"] == str(file)
    assert model["num_tensors"] == len(load_file(checkpoint / "model.safetensors"))
    config = json.loads((checkpoint / "config.json").read_text()) | {"intermediate_size": 32}
    (checkpoint / "config.json").write_text(json.dumps(config))
    write_gguf(checkpoint, file, GGMLQuantizationType.Q8_0, tokens)
    assert_refused("misshapen: .*ffn_", "--model", file)


def test_experts_in_mxfp4_are_checked(tmp_path: Path) -> None:
    """Each matrix of an expert counts as one tensor."""
    folder = write_checkpoint(write_tiny_llm(tmp_path / "tiny"), make_tiny_config("gpt_oss"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    packed_tensors, num_matrices = {}, 0
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        num_matrices += experts
        packed_tensors[f"{name}_blocks"] = np.zeros((experts, outputs, inputs // 32, 16), np.uint8)
        packed_tensors[f"{name}_scales"] = np.zeros((experts, outputs, inputs // 32), np.uint8)
    assert packed_tensors
    save_file(tensors | packed_tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_report("--model", folder)["models"][0]["num_tensors"] == len(tensors) + num_matrices
    save_file(tensors | {name: tensor[:, 1:] for name, tensor in packed_tensors.items()}, file)
    assert_refused("misshapen", "--model", folder)


def test_checking_shapes_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_llm(tmp_path / "tiny")
    monkeypatch.setattr(loading, "safe_open", lambda *_, **__: pytest.fail("a tensor was read"))
    read_report("--model", folder)
    norm = loading.Weights.open(folder, shapes_only=True).tensor("model.norm.weight", (32,))
    assert norm.is_meta
