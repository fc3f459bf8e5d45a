"""Memory estimates from the headers of small checkpoints and of the demo model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.encodings import HalvedEncoding
from support.networks import weight_bytes
from support.pipeline_steps import open_pipeline

import penstock
from penstock.config import LoRAConfig, ModelConfig, PipelineConfig
from penstock.kernels import ENCODINGS
from penstock.memory import (
    estimate_activation_memory,
    estimate_adapters_size,
    estimate_weights_size,
)
from penstock.nn import TensorNames


def write_estimate_checkpoint(folder: Path, *, is_head_tied: bool = False, **settings: Any) -> PipelineConfig:
    """Write a checkpoint with a vocabulary of 10 and a hidden size of 4.

    The checkpoint has an embedding table, a linear layer of 6 outputs, two experts of 3 outputs, a norm, a
    position table of integers, and an output head.
    """
    from safetensors.torch import save_file
    from torch import int64, ones

    tensors = {
        "model.embed_tokens.weight": ones(10, 4),
        "model.layers.0.mlp.up_proj.weight": ones(6, 4),
        "model.layers.0.mlp.up_proj.bias": ones(6),
        "model.layers.0.experts.weight": ones(2, 3, 4),
        "model.norm.weight": ones(4),
        "model.position_ids": ones(5, dtype=int64),
        "lm_head.weight": ones(10, 4),
    }
    save_file(tensors, folder / "model.safetensors")
    config = {"dtype": "float32", "vocab_size": 10, "tie_word_embeddings": is_head_tied}
    (folder / "config.json").write_text(json.dumps(config))
    return PipelineConfig(model=ModelConfig(model_path=str(folder), **settings), max_batch_size=2)


@pytest.mark.parametrize(
    ("encoding", "is_head_tied", "size"),
    [
        # Linear layers and the head are stored in panels of 64 outputs.
        (None, False, 4 * (40 + 6 + 4 + 4 * 64 * 4) + 40),
        ("float32", True, 4 * (40 + 6 + 4 + 4 * 64 * 4) + 40),
        ("bfloat16", False, 2 * (40 + 6 + 4 + 4 * 64 * 4) + 40),
        ("int8", False, 2 * (40 + 6 + 4) + 4 * 64 * 4 + 4 * (6 + 3 + 3 + 10) + 40),
        # All layers are too small for int4, so they are stored in int8.
        ("int4", False, 2 * (40 + 6 + 4) + 4 * 64 * 4 + 4 * (6 + 3 + 3 + 10) + 40),
        ("half-byte", False, 4 * (40 + 6 + 4) + (24 + 24 + 40) // 2 + 40),
    ],
)
def test_the_size_of_the_loaded_weights_is_estimated(
    tmp_path: Path, encoding: str | None, is_head_tied: bool, size: int
) -> None:
    with ENCODINGS.extended(HalvedEncoding("half-byte", 0.5)):
        config = write_estimate_checkpoint(
            tmp_path, is_head_tied=is_head_tied, quantization_encoding=encoding
        )
        assert estimate_weights_size(config) == size


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_the_estimate_equals_the_size_of_the_weights_in_the_back_end(kernels: str) -> None:
    """With "int4", a weight of the demo model has 5 bits in the C++ kernels, and 8 in the reference."""
    pipeline = open_pipeline(
        Path(penstock.__file__).parent / "demo", kernels=kernels, quantization_encoding="int4", num_threads=1
    )
    assert estimate_weights_size(pipeline.model.pipeline_config) == weight_bytes(pipeline)


@pytest.mark.parametrize("stored_name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_head_counts_in_addition_to_its_table(tmp_path: Path, stored_name: str) -> None:
    from safetensors.torch import load_file, save_file

    write_estimate_checkpoint(tmp_path)
    names = {"model.embed_tokens.weight", "lm_head.weight"}
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in names - {stored_name}},
        tmp_path / "model.safetensors",
    )
    config = PipelineConfig(model=ModelConfig(model_path=str(tmp_path)), max_batch_size=2)
    assert estimate_weights_size(config) == 4 * (40 + 6 + 4 + 4 * 64 * 4) + 40


def test_the_size_of_the_activations_is_estimated(tmp_path: Path) -> None:
    config = replace(write_estimate_checkpoint(tmp_path), max_batch_input_tokens=100)
    size = estimate_activation_memory(config, config.model.huggingface_config)
    assert size == 100 * 6 * 6 * 4 + 2 * 10 * 20


@pytest.mark.parametrize(("encoding", "size"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("is_head_tied", [False, True])
def test_the_memory_of_adapters_is_estimated(
    tmp_path: Path, encoding: str, is_head_tied: bool, size: int
) -> None:
    config = write_estimate_checkpoint(tmp_path, is_head_tied=is_head_tied, quantization_encoding=encoding)
    assert estimate_adapters_size(config) == 0
    config = replace(config, lora=LoRAConfig(enable_lora=True, max_loras=3, max_lora_rank=5))
    widths = (6 + 4) + 2 * (3 + 4) + (10 + 4)
    assert estimate_adapters_size(config) == 3 * 5 * widths * size


def test_the_memory_of_a_family_with_its_own_tensor_names_is_estimated(tmp_path: Path) -> None:
    """The embedding table, head, value projection and router are recognized by the family's own names."""
    from safetensors.torch import save_file
    from torch import ones

    shapes = {
        "decoder.words.weight": (100, 128),
        "decoder.block_0.attn.query.weight": (128, 128),
        "decoder.block_0.attn.value.weight": (128, 128),
        "decoder.block_0.choose.weight": (64, 128),
        "output.weight": (100, 128),
    }
    save_file({name: ones(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32", "vocab_size": 100}))
    config = PipelineConfig.from_flat(
        {
            "model_path": str(tmp_path),
            "quantization_encoding": "int4",
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": 1,
        }
    )
    names = TensorNames(
        prefix="decoder.",
        embedding="words",
        head="output",
        block="block_{layer}",
        attention="attn",
        qkv=("query", "key", "value"),
        router="choose",
    )
    int8_encoding, int5_encoding, float_encoding = (ENCODINGS[name] for name in ("int8", "int5", "bfloat16"))
    assert estimate_weights_size(config, names) == (
        100 * 128 * 2  # the embedding table
        + int5_encoding.num_bytes(128, 128)  # queries
        + int8_encoding.num_bytes(128, 128)  # values
        + float_encoding.num_bytes(64, 128)  # the router
        + int8_encoding.num_bytes(100, 128)  # the output head
    )
    widths = [128 + 128, 128 + 128, 64 + 128, 100 + 128]
    assert estimate_adapters_size(config, names) == 2 * sum(widths)
    assert estimate_weights_size(config) != estimate_weights_size(config, names)
