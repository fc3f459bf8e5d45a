"""Quantized checkpoints on two ranks: logits, and shards that keep the encoding of the file."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from support.gguf_files import write_gguf
from support.packed_checkpoints import InputOrder, gptq, write_packed_checkpoint
from support.pipeline_steps import make_context, open_pipeline, random_tokens, step_logits
from support.rank_pair import RankPair
from support.tiny_llm import write_tiny_llm

from penstock.errors import ConfigError
from penstock.kernels import ENCODINGS
from penstock.weights import Weights


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama whose linear layers have several quantization groups of 32 inputs."""
    return write_tiny_llm(
        tmp_path_factory.mktemp("wide"), hidden_size=128, intermediate_size=224, num_attention_heads=4
    )


def compare_with_one_process(rank_pair: RankPair, checkpoint: Path) -> None:
    """Check that the logits of two ranks are close to those of one process, in the encodings of the file."""

    def compute_logits(pipeline: Any) -> torch.Tensor:
        context = make_context(random_tokens(20, 250, seed=1))
        (logits,) = step_logits(pipeline, [context])
        pipeline.release(context)
        return logits

    settings = {"quantization_encoding": None}
    expected = compute_logits(open_pipeline(checkpoint, **settings))
    gc.collect()
    with rank_pair.open(checkpoint, **settings) as sharded_pipeline:
        error = compute_logits(sharded_pipeline) - expected
    assert float(error.square().mean().sqrt() / expected.std()) < 0.06


@pytest.mark.parametrize("order", ["none", "inputs"])
def test_logits_of_gptq_are_close_to_one_process(
    rank_pair: RankPair,
    wide_checkpoint: Path,
    tmp_path: Path,
    order: InputOrder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A layer is dequantized if its inputs are permuted and divided among ranks."""
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    section["desc_act"] = order != "none"
    compare_with_one_process(
        rank_pair, write_packed_checkpoint(wide_checkpoint, tmp_path, gptq(4, 32, order=order), section)
    )
    assert ("mlp.down_proj are stored with permuted inputs" in caplog.text) == (order != "none")
    assert "gate_proj" not in caplog.text


@pytest.mark.parametrize("ggml_type", ["Q4_0", "Q8_0", pytest.param("Q5_1", marks=pytest.mark.slow)])
def test_logits_of_gguf_are_close_to_one_process(
    rank_pair: RankPair, wide_checkpoint: Path, tmp_path: Path, ggml_type: str
) -> None:
    compare_with_one_process(
        rank_pair, write_gguf(wide_checkpoint, tmp_path / "m.gguf", GGMLQuantizationType[ggml_type])
    )


@pytest.mark.parametrize("ggml_type", ["F32", "Q8_0", "Q5_1"])
def test_rows_of_a_gguf_tensor_can_be_read_separately(
    wide_checkpoint: Path, tmp_path: Path, ggml_type: str
) -> None:
    weights = Weights.open(write_gguf(wide_checkpoint, tmp_path / "m.gguf", GGMLQuantizationType[ggml_type]))
    for name, shape, start, stop in (
        # GGUF interleaves the rows of each head.
        ("model.layers.0.self_attn.q_proj.weight", (128, 128), 32, 96),
        ("model.layers.1.mlp.up_proj.weight", (224, 128), 96, 224),
    ):
        encoding, full_weight = weights.read_linear(name, shape)
        row_encoding, rows = weights.rows(name, shape, start, stop)
        assert row_encoding == encoding
        assert all(torch.equal(rows[key], full_weight[key][start:stop]) for key in full_weight)


@pytest.mark.parametrize("encoding", list(ENCODINGS))
def test_inputs_can_be_split_only_between_groups(encoding: str) -> None:
    linear_encoding = ENCODINGS[encoding]
    weight = torch.randn(6, 320)
    tensors = linear_encoding.pack(weight)
    # The K types of GGUF are split between superblocks of 256.
    start = max(128, linear_encoding.split_unit or 1)
    selected_tensors = linear_encoding.select_inputs("down_proj", tensors, start, 320)
    assert torch.equal(linear_encoding.unpack(selected_tensors), linear_encoding.unpack(tensors)[:, start:])
    if linear_encoding.group_size is not None:
        message = f"inputs 0 to 47 of down_proj, but its {encoding} weights can be divided only"
        with pytest.raises(ConfigError, match=message):
            linear_encoding.select_inputs("down_proj", tensors, 0, 48)
