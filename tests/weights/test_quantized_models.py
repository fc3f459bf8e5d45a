"""Models of quantized checkpoints: adapters, logits, packed files, and compiled steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import packed_checkpoints as packers
from support.adapters import peft_logits, write_adapter
from support.checkpoints import (
    load_in_transformers,
    make_tiny_config,
    transformers_logits,
    write_checkpoint,
)
from support.gguf_files import write_random_blocks
from support.networks import modules_and_weights
from support.packed_checkpoints import write_packed_checkpoint
from support.pipeline_steps import append_token, make_context, open_pipeline, random_tokens, step_logits

from penstock.assembly import check_checkpoint, pack_checkpoint
from penstock.kernels import PackedLinear
from penstock.kernels.cpu import available_isas
from penstock.kernels.cpu.ops import CpuOps
from penstock.pipelines import PipelineConfig

TOKENS = random_tokens(20, 120, seed=5)
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
MXFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
CASES: dict[str, tuple[packers.Packer, dict[str, Any]]] = {
    "awq": (packers.awq(), {"quant_method": "awq", "bits": 4, "group_size": 32}),
    "fp8": (
        packers.fp8((128, 128), name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "desc-act": (
        packers.gptq(order="inputs"),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    ),
    "nf4": (packers.bitsandbytes(nested=True), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nvfp4": (packers.nvfp4("modelopt"), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "mxfp4": (
        packers.mxfp4,
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": MXFP4_WEIGHTS}},
        },
    ),
}
BLOCK_TYPES = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_output": "Q5_K", "output.": "Q6_K", "": "Q4_K"}
needs_kernels = pytest.mark.skipif(not available_isas(), reason="the C++ kernels are not built")


@pytest.fixture(scope="module", params=[*CASES, "gguf"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gguf":
        return write_gguf_model(folder, make_tiny_config("llama"))
    float_folder = write_checkpoint(folder / "floats", make_tiny_config("llama") | SIZES)
    return write_packed_checkpoint(float_folder, folder / "packed", *CASES[request.param])


def write_gguf_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a GGUF file of several block types, and a folder ``plain`` with the same weights as floats."""
    block_sizes = {"hidden_size": 256, "intermediate_size": 256}
    float_folder = write_checkpoint(folder / "floats", config | SIZES | block_sizes)
    tensors = write_random_blocks(float_folder, folder / "m.gguf", BLOCK_TYPES)
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").write_text((float_folder / "config.json").read_text())
    save_file(tensors, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    return folder / "m.gguf"


def find_dequantized_checkpoint(checkpoint: Path) -> Path:
    return (checkpoint if checkpoint.is_dir() else checkpoint.parent) / "plain"


def compute_logits(checkpoint: Path, adapter: str | None = None, **config: Any) -> torch.Tensor:
    pipeline = open_pipeline(checkpoint, **({"quantization_encoding": None} | config))
    return step_logits(pipeline, [make_context(TOKENS, adapter=adapter)])[0].float()


def test_adapter_logits_are_close_to_peft_and_differ_from_the_base_model(
    checkpoint: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(find_dequantized_checkpoint(checkpoint), tmp_path)
    expected = peft_logits(find_dequantized_checkpoint(checkpoint), adapter, TOKENS)
    actual = compute_logits(checkpoint, "tone", lora=(f"tone={adapter}",))
    assert float((actual - expected).norm() / expected.norm()) < 0.08
    assert float((actual - compute_logits(checkpoint)).norm() / expected.norm()) > 0.1


def test_no_quantized_layer_is_dequantized(checkpoint: Path) -> None:
    """In the GGUF file, the block type of v_proj differs from that of q_proj and k_proj.

    Layers of different types are not fused, because fusing would dequantize them.
    """
    model: Any = open_pipeline(checkpoint, quantization_encoding=None).model
    encodings = {
        layer.encoding for layer in modules_and_weights(model.network) if isinstance(layer, PackedLinear)
    }
    if not checkpoint.is_dir():
        assert encodings == {"q4_k", "q5_k", "q6_k"}
    assert "bfloat16" not in encodings - {model.pipeline_config.model.encoding}


def test_logits_are_close_to_transformers_with_the_dequantized_weights(checkpoint: Path) -> None:
    expected = transformers_logits(load_in_transformers(find_dequantized_checkpoint(checkpoint)), TOKENS)
    actual = compute_logits(checkpoint)
    assert float((actual - expected).norm() / expected.norm()) < 0.08


@needs_kernels
def test_packed_files_give_equal_logits(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = compute_logits(checkpoint)
    config = PipelineConfig.from_flat({"model_path": str(checkpoint), "max_batch_size": 8})
    pack_checkpoint(config)
    for name in ("pack_linear", "pack_quantized", "pack_lazily"):
        monkeypatch.setattr(
            CpuOps, name, lambda *_, **__: pytest.fail("a layer was packed again"), raising=False
        )
    assert torch.equal(compute_logits(checkpoint), expected)


def test_check_checkpoint_accepts_the_checkpoint(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock import assembly

    monkeypatch.setattr(assembly, "load_tokenizer", lambda _: "tokenizer")
    assert check_checkpoint(PipelineConfig.from_flat({"model_path": str(checkpoint)})) == "tokenizer"


@needs_kernels
def test_compiled_steps_give_equal_logits(checkpoint: Path) -> None:
    logits: dict[bool, list[torch.Tensor]] = {}
    graph_statuses: dict[bool, str] = {}
    for is_compiled in (False, True):
        pipeline = open_pipeline(checkpoint, quantization_encoding=None, enable_prefix_caching=False)
        pipeline.session.use_graphs = is_compiled
        context, logits[is_compiled] = make_context(TOKENS), []
        for _ in range(8):
            (row,) = step_logits(pipeline, [context])
            logits[is_compiled].append(row)
            append_token(pipeline, context, int(row[-1].argmax()))
        graph_statuses[is_compiled] = pipeline.session.graph_status
    assert graph_statuses[True].startswith("compiled"), graph_statuses
    assert not graph_statuses[False].startswith("compiled")
    assert all(
        torch.equal(eager_logits, compiled_logits)
        for eager_logits, compiled_logits in zip(*logits.values(), strict=True)
    )
