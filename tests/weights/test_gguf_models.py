"""GGUF models: tensors and logits equal to the source checkpoints, block types, and invalid files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from support.checkpoints import make_tiny_config, write_checkpoint
from support.gguf_files import (
    ARCHITECTURES,
    add_config,
    convert_tensors,
    random_blocks,
    tokenizer_metadata,
    write_and_close,
    write_gguf,
)
from support.networks import weight_bytes
from support.pipeline_steps import make_context, open_pipeline, step_logits
from support.tiny_llm import write_tiny_llm

from penstock import LLM, SamplingParams
from penstock.config import HuggingFaceConfig, PipelineConfig
from penstock.errors import UnknownArchitectureError, WeightsError
from penstock.kernels import ENCODINGS, unpack_linear
from penstock.nn import loader
from penstock.weights import Weights

pytestmark = pytest.mark.models

# Settings that GGUF has no keys for, with the values that its readers assume.
ASSUMED_SETTINGS: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layer_interval": 4},
    "qwen2": {"use_sliding_window": False},
    "qwen3_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True},
    "hunyuan_v1_dense": {"rope_scaling": None},
    "phi": {"qk_layernorm": False},
    "gemma3_text": {"sliding_window_pattern": 6, "num_hidden_layers": 7},
}
TOKENS = [
    5,
    77,
    23,
    9,
    101,
    64,
    3,
    88,
    120,
    41,
    7,
    7,
    30,
    55,
    99,
    12,
    60,
    61,
    62,
    63,
    100,
    90,
    80,
    70,
    50,
    40,
]


def write_family_checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    config = make_tiny_config(family) | ASSUMED_SETTINGS.get(family, {}) | changes
    return write_checkpoint(folder / family, config)


def compute_logits(checkpoint: Path, **config: Any) -> torch.Tensor:
    pipeline = open_pipeline(checkpoint, **config)
    return step_logits(pipeline, [make_context(TOKENS, log_probabilities_echo=True)])[0]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_tensors_and_logits_equal_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    checkpoint = write_family_checkpoint(family, tmp_path)
    file = write_gguf(checkpoint, tmp_path / "m.gguf")
    original_weights, converted_weights = Weights.open(checkpoint), Weights.open(file)
    tied_names = {"lm_head.weight"} if HuggingFaceConfig.from_checkpoint(file).tie_word_embeddings else set()
    names_in_metadata = {name for name in original_weights.names if ".act_fn." in name}
    # Some checkpoints stack the matrices of experts, which are separate in the file. Only the logits are
    # compared for these matrices.
    stacked_names = {name for name in original_weights.names if re.search(r"\.experts\.\w+_proj$", name)}
    names = {name for name in converted_weights.names if not stacked_names or ".experts." not in name}
    assert names == set(original_weights.names) - tied_names - names_in_metadata - stacked_names
    for name in names:
        shape = original_weights.shape(name)
        torch.testing.assert_close(
            converted_weights.tensor(name, shape), original_weights.tensor(name, shape), atol=3e-7, rtol=0
        )
        if len(shape) == 2 and shape[0] > 8:
            rows_of_both = [
                weights.rows(name, shape, 8, min(40, shape[0]))[1]["weight"]
                for weights in (converted_weights, original_weights)
            ]
            torch.testing.assert_close(*rows_of_both, atol=3e-7, rtol=0)
    if not stacked_names:
        converted_weights.finish()
    torch.testing.assert_close(compute_logits(file), compute_logits(checkpoint), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("float_type", ["F16", "BF16"])
def test_logits_of_16_bit_floats_equal_those_of_rounded_weights(
    family: str, float_type: str, tmp_path: Path
) -> None:
    """The matrices of the reference checkpoint are rounded to the type before its logits are computed."""
    checkpoint = write_family_checkpoint(family, tmp_path)
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[float_type]
    tensors = load_file(checkpoint / "model.safetensors")
    rounded_tensors = {
        name: tensor.to(dtype).float() if tensor.dim() > 1 else tensor for name, tensor in tensors.items()
    }
    save_file(rounded_tensors, checkpoint / "model.safetensors")
    file = write_gguf(checkpoint, tmp_path / "m.gguf", GGMLQuantizationType[float_type])
    expected = compute_logits(checkpoint, quantization_encoding="float32")
    assert torch.equal(compute_logits(file, quantization_encoding="float32"), expected)
    config = PipelineConfig.from_flat({"model_path": str(file)}).model
    is_cpu = str(config.devices[0]) == "cpu"
    expected_encoding = "bfloat16" if is_cpu else {"F16": "float16", "BF16": "bfloat16"}[float_type]
    assert config.encoding == expected_encoding


BLOCK_ENCODINGS = {
    "Q4_0": "int4",
    "Q4_1": "q4_1",
    "Q5_0": "int5",
    "Q5_1": "q5_1",
    "Q8_0": "uint8",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "MXFP4": "mxfp4",
}
"""Block type -> encoding that stores the blocks unchanged."""


@pytest.mark.parametrize("block_type_name", [*BLOCK_ENCODINGS, "IQ2_S", "TQ1_0"])
def test_quantized_blocks_are_dequantized_exactly(
    block_type_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors of random blocks equal the numbers that the gguf package dequantizes."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    checkpoint = write_family_checkpoint("llama", tmp_path, **sizes)
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    add_config(writer, config)
    block_type = GGMLQuantizationType[block_type_name]
    dequantized: dict[str, torch.Tensor] = {}
    rng = np.random.default_rng(0)
    for (name, tensor), original_name in zip(convert_tensors(tensors, config).items(), tensors, strict=True):
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.float().numpy())
            continue
        blocks = random_blocks(tuple(tensor.shape), block_type_name, rng)
        writer.add_tensor(name, blocks, raw_dtype=block_type)
        dequantized[original_name] = torch.from_numpy(gguf.quants.dequantize(blocks, block_type))
    write_and_close(writer)
    weights = Weights.open(tmp_path / "m.gguf")
    for name, numbers in dequantized.items():
        actual = weights.tensor(name, tuple(numbers.shape))
        if ".q_proj." in name or ".k_proj." in name:
            num_heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            numbers = numbers.view(num_heads, -1, 2, numbers.shape[1]).transpose(1, 2).reshape(numbers.shape)
        assert torch.equal(actual, numbers), name
    model = PipelineConfig.from_flat({"model_path": str(tmp_path / "m.gguf")})
    assert model.model.encoding == BLOCK_ENCODINGS.get(block_type_name, "bfloat16")
    exact_logits = compute_logits(tmp_path / "m.gguf", quantization_encoding="float32")
    if block_type_name in BLOCK_ENCODINGS:
        for name, numbers in dequantized.items():
            stored_encoding, rows = weights.read_linear(name, (numbers.shape[0], numbers.shape[1]))
            assert stored_encoding == BLOCK_ENCODINGS[block_type_name]
            assert torch.equal(
                ENCODINGS[stored_encoding].unpack(rows), weights.tensor(name, tuple(numbers.shape))
            )
        quantized_logits = compute_logits(tmp_path / "m.gguf", quantization_encoding=None)
        assert float((quantized_logits - exact_logits).norm() / exact_logits.norm()) < 0.1
    else:
        compute_logits(tmp_path / "m.gguf", quantization_encoding=None)
    assert ("quantized weights are dequantized to" in caplog.text) == (block_type_name not in BLOCK_ENCODINGS)
    assert torch.isfinite(exact_logits).all()


@pytest.mark.parametrize("block_type", ["Q8_0", "Q5_0", "F16"])
def test_a_large_table_is_dequantized_in_chunks(
    block_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks have 48 of the 130 rows of the table."""
    checkpoint = write_family_checkpoint("qwen2", tmp_path, hidden_size=256, num_hidden_layers=1)
    file = write_gguf(checkpoint, tmp_path / "m.gguf", GGMLQuantizationType[block_type])
    expected = open_pipeline(file).model.network.embedding.table
    assert torch.equal(expected, Weights.open(file).tensor("model.embed_tokens.weight", (130, 256)))
    monkeypatch.setattr(loader, "_TABLE_CHUNK_ROWS", 48)
    read_rows: list[tuple[int, int]] = []
    original_rows = Weights.rows

    def recorded_rows(self: Weights, name: str, shape: tuple[int, int], start: int, stop: int) -> Any:
        read_rows.append((start, stop))
        return original_rows(self, name, shape, start, stop)

    monkeypatch.setattr(Weights, "rows", recorded_rows)
    assert torch.equal(open_pipeline(file).model.network.embedding.table, expected)
    assert read_rows == ([] if block_type == "F16" else [(0, 48), (48, 96), (96, 130)])


def test_q4_0_is_kept_unchanged(tmp_path: Path) -> None:
    """Separate and fused layers keep the integers and scales of the file. Float layers stay floats."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 1}
    checkpoint = write_family_checkpoint("llama", tmp_path, **sizes)
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    add_config(writer, config)
    rng = np.random.default_rng(0)
    for name, tensor in convert_tensors(tensors, config).items():
        if tensor.dim() == 1 or "attn_v" in name:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            blocks = random_blocks(tuple(tensor.shape), "Q4_0", rng)
            writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType.Q4_0)
    write_and_close(writer)
    pipeline = open_pipeline(tmp_path / "m.gguf", quantization_encoding=None)
    network: Any = pipeline.model.network  # type: ignore[attr-defined]
    weights = Weights.open(tmp_path / "m.gguf")
    block, name = network.blocks[0], "model.layers.0"
    layers = [
        (block.attention.qkv, ["self_attn.q_proj", "self_attn.k_proj"]),
        (block.attention.output, ["self_attn.o_proj"]),
        (block.mlp.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
        (block.mlp.down, ["mlp.down_proj"]),
    ]
    for linear, names in layers:
        assert linear.packed.encoding == "int4"
        unpacked, start = unpack_linear(linear.packed).cpu(), 0
        for slice_name in names:
            shape = weights.shape(f"{name}.{slice_name}.weight")
            expected = weights.tensor(f"{name}.{slice_name}.weight", shape)
            assert torch.equal(unpacked[start : start + shape[0]], expected), slice_name
            start += shape[0]
    loaded_bytes, estimated_bytes = (
        weight_bytes(pipeline),
        pipeline.model.estimate_weights_size(pipeline.model.pipeline_config),
    )
    assert 0.995 * loaded_bytes <= estimated_bytes <= 1.1 * loaded_bytes
    value_name = f"{name}.self_attn.v_proj.weight"
    value_weight = weights.tensor(value_name, weights.shape(value_name))
    assert block.attention.values.packed.encoding == "bfloat16", (
        "the float layer must not be fused with quantized layers"
    )
    assert torch.equal(unpack_linear(block.attention.values.packed).cpu(), value_weight.bfloat16())


def test_float_tensors_are_copy_on_write_views_of_the_mapped_file(tmp_path: Path) -> None:
    file = write_gguf(write_family_checkpoint("llama", tmp_path), tmp_path / "m.gguf")
    weights = Weights.open(file)
    views = [weights.tensor(f"model.layers.{i}.mlp.up_proj.weight", (88, 48)) for i in range(2)]
    assert views[0].untyped_storage().data_ptr() == views[1].untyped_storage().data_ptr()
    bytes_before = file.read_bytes()
    views[0].zero_()
    assert file.read_bytes() == bytes_before


def test_a_model_in_two_files_is_loaded(tmp_path: Path) -> None:
    checkpoint = write_family_checkpoint("qwen2", tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = convert_tensors(load_file(checkpoint / "model.safetensors"), config)
    for number in (1, 2):
        writer = GGUFWriter(tmp_path / f"m-0000{number}-of-00002.gguf", "qwen2")
        if number == 1:
            add_config(writer, config)
        for name in list(tensors)[number - 1 :: 2]:
            writer.add_tensor(name, tensors[name].numpy())
        write_and_close(writer)
    logits = compute_logits(tmp_path / "m-00001-of-00002.gguf")
    torch.testing.assert_close(logits, compute_logits(checkpoint), atol=1e-4, rtol=0)


def test_text_of_a_gguf_file_equals_the_text_of_the_checkpoint(tmp_path: Path) -> None:
    """Configuration, tokenizer, template, EOS tokens and weights come from one file."""
    checkpoint = write_tiny_llm(tmp_path / "m")
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    template = json.loads((checkpoint / "tokenizer_config.json").read_text())["chat_template"]
    metadata = tokenizer_metadata(tokenizer, "gpt-2")
    metadata |= {"tokenizer.chat_template": template, "tokenizer.ggml.eos_token_id": 256}
    file = write_gguf(checkpoint, tmp_path / "m.gguf", metadata=metadata)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    messages = [{"role": "user", "content": "Hé!"}]
    with LLM(str(checkpoint)) as original_llm, LLM(str(file)) as gguf_llm:
        assert gguf_llm.generate("Once", params)[0].text == original_llm.generate("Once", params)[0].text
        assert (
            gguf_llm.chat(messages, params)[0].token_ids == original_llm.chat(messages, params)[0].token_ids
        )


def test_errors_contain_tensor_names_of_the_file(tmp_path: Path) -> None:
    checkpoint = write_family_checkpoint("llama", tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = convert_tensors(load_file(checkpoint / "model.safetensors"), config)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    add_config(writer, config)
    del tensors["blk.1.ffn_down.weight"]
    tensors["blk.0.attn_v.weight"] = torch.zeros(3, 48)
    tensors["blk.0.more.weight"] = torch.zeros(3)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    write_and_close(writer)
    with pytest.raises(WeightsError) as error:
        open_pipeline(tmp_path / "m.gguf")
    for expected_message in (
        "1 missing: model.layers.1.mlp.down_proj.weight",
        "1 misshapen: model.layers.0.self_attn.v_proj.weight (blk.0.attn_v.weight in the file) is [3, 48]",
        "1 unexpected: blk.0.more.weight",
    ):
        assert expected_message in str(error.value)


def test_an_unsupported_block_type_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(1)
    block_type = GGMLQuantizationType.Q8_K
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((1, 292), np.uint8), raw_dtype=block_type)
    write_and_close(writer)
    with pytest.raises(
        WeightsError,
        match=r"blk.0.ffn_up.weight has type Q8_K, which cannot be read: use one of F16, .* Q4_K",
    ):
        Weights.open(tmp_path / "m.gguf")


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "lama")
    write_and_close(writer)
    with pytest.raises(UnknownArchitectureError, match=r"'lama' is not known .*did you mean llama\?"):
        Weights.open(tmp_path / "m.gguf")
