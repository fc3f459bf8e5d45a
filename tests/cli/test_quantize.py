"""``penstock quantize``: the written checkpoint holds the packed weights and can be loaded."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from support.checkpoints import make_tiny_config, write_checkpoint
from support.pipeline_steps import make_context, open_pipeline, random_tokens, step_logits

from penstock.cli import cli
from penstock.weights import Weights, export
from penstock.weights.hub import resolve_checkpoint

TOKENS = random_tokens(20, 120, seed=1)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def run_quantize(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["quantize", *map(str, arguments)])


def compute_logits(folder: Path, encoding: str | None = None) -> torch.Tensor:
    pipeline = open_pipeline(folder, quantization_encoding=encoding)
    return step_logits(pipeline, [make_context(TOKENS, log_probabilities_echo=True)])[0].float()


@pytest.fixture(scope="module", params=["llama", "phi3", "mixtral"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), make_tiny_config(request.param) | SIZES)


@pytest.mark.parametrize(
    ("encoding", "stored_encoding", "max_error"), [("int4", "uint4", 0.12), ("int8", "int8", 0.012)]
)
def test_quantized_weights_are_close_to_the_original_and_logits_to_the_dequantized_model(
    checkpoint: Path, encoding: str, stored_encoding: str, max_error: float, tmp_path: Path
) -> None:
    result = run_quantize("--model", checkpoint, "--encoding", encoding, "--out", tmp_path / "q", "--json")
    assert result.exit_code == 0, result.stderr
    actual = json.loads(result.stdout)
    assert actual["bytes"]["after"] < actual["bytes"]["before"]
    weights_before, weights_after = Weights.open(checkpoint), Weights.open(tmp_path / "q")
    assert weights_before.names == weights_after.names
    num_quantized = 0
    for name in weights_before.names:
        shape = weights_before.shape(name)
        original_weight, quantized_weight = (
            weights_before.tensor(name, shape).float(),
            weights_after.tensor(name, shape).float(),
        )
        if weights_after.stored_encoding(name) is None:
            assert torch.equal(original_weight, quantized_weight)
            assert "proj" not in name
            continue
        num_quantized += 1
        assert weights_after.stored_encoding(name) == stored_encoding
        assert float((quantized_weight - original_weight).norm() / original_weight.norm()) < max_error
    assert num_quantized == actual["num_layers"]
    weights_after.finish()
    error = compute_logits(tmp_path / "q") - compute_logits(tmp_path / "q", "float32")
    assert float(error.norm() / compute_logits(tmp_path / "q", "float32").norm()) < 0.2
    assert not (tmp_path / "q" / "model.safetensors.index.json").exists()


def test_a_sharded_checkpoint_has_the_same_tensors(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_quantize("--model", checkpoint, "--out", tmp_path / "one").exit_code == 0
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", 20_000)
    result = run_quantize("--model", checkpoint, "--out", tmp_path / "many")
    assert result.exit_code == 0
    assert "layers in int4" in result.stdout
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    unsharded_tensors = load_file(tmp_path / "one" / "model.safetensors")
    sharded_tensors: dict[str, torch.Tensor] = {}
    for file in files:
        sharded_tensors |= load_file(file)
    assert sharded_tensors.keys() == unsharded_tensors.keys()
    assert all(torch.equal(sharded_tensors[name], tensor) for name, tensor in unsharded_tensors.items())
    assert Weights.open(tmp_path / "many").num_bytes == Weights.open(tmp_path / "one").num_bytes


def test_the_quantized_demo_model_generates_and_has_all_files(tmp_path: Path) -> None:
    assert run_quantize("--out", tmp_path / "q").exit_code == 0
    result = CliRunner().invoke(
        cli, ["generate", "--model", str(tmp_path / "q"), "--prompt", "Once upon a time"]
    )
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout) > 20
    files = [file.name for file in resolve_checkpoint("demo", "main").iterdir() if file.is_file()]
    assert {*files} - {"README.md", "__init__.py"} <= {file.name for file in (tmp_path / "q").iterdir()}


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run_quantize("--out", tmp_path)
    assert result.exit_code == 2
    assert "is not empty: name a new folder" in result.stderr
    assert run_quantize("--out", tmp_path / "x", "--encoding", "bfloat16").exit_code == 2
    assert "name a new folder with --out" in run_quantize().stderr
    assert (
        "is set by --encoding"
        in run_quantize("--out", tmp_path / "x", "--quantization-encoding", "int8").stderr
    )


@pytest.mark.skipif(not find_spec("compressed_tensors"), reason="compressed-tensors is not installed")
@pytest.mark.parametrize("encoding", ["int4", "int8"])
def test_transformers_gives_close_logits_with_the_quantized_checkpoint(
    checkpoint: Path, encoding: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    if "mixtral" in str(checkpoint) and encoding == "int8":
        pytest.skip("transformers cannot stack the int8 weights of experts")
    assert run_quantize("--model", checkpoint, "--encoding", encoding, "--out", tmp_path / "q").exit_code == 0
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    actual = compute_logits(tmp_path / "q", "float32")
    assert float((actual - expected).norm() / expected.norm()) < (0.01 if encoding == "int4" else 0.2)
