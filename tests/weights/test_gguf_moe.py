"""GGUF files of MoE models give the logits of their source checkpoints. Unsupported keys are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from support.checkpoints import DECODERS, write_checkpoint
from support.gguf_files import write_and_close
from support.pipeline_steps import make_context, open_pipeline, random_tokens, step_logits
from torch import Tensor

from penstock.errors import WeightsError
from penstock.weights.gguf_config import gguf_config

GGUF_ARCHITECTURES = {
    "qwen2_moe": "qwen2moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "ernie4_5_moe": "ernie4_5-moe",
    "phimoe": "phimoe",
    "llama4_text": "llama4",
}
CONFIG_CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"mlp_only_layers": []},
    "phimoe": {"router_jitter_noise": 0.01},
    "llama4_text": {
        "attention_chunk_size": 8192,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0],
        "attention_bias": False,
    },
}
BLOCK_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "gate": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "router.layer": "ffn_gate_inp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "e_score_correction_bias": "exp_probs_b.bias",
}
MODEL_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
EXPERT_MATRICES = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}


def interleave_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Interleave the two halves of the rows of each head, as in GGUF files of Granite."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def convert_tensors(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint under their GGUF names.

    Correction biases and the gate of a shared expert become vectors.
    """
    gguf_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if stem in MODEL_TENSORS:
            gguf_tensors[f"{MODEL_TENSORS[stem]}.{suffix}"] = tensor
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        assert match is not None
        block, block_tensor = (
            f"blk.{match[1]}",
            re.sub(r"^(mlp|block_sparse_moe|feed_forward)\.", "", match[2]),
        )
        expert_match = re.fullmatch(r"experts\.(\d+)\.(\w+)\.weight", block_tensor)
        shared_match = re.fullmatch(r"shared_experts?\.(\w+)\.(\w+)", block_tensor)
        if expert_match is not None:
            key = f"{block}.ffn_{EXPERT_MATRICES[expert_match[2]]}_exps.weight"
            num_stored_experts = sum(
                f".{match[1]}." in key and key.endswith(f".{expert_match[2]}.weight") for key in tensors
            )
            gguf_tensors.setdefault(key, torch.zeros(config["num_local_experts"], *tensor.shape))[
                int(expert_match[1])
            ] = tensor
            assert num_stored_experts >= config["num_local_experts"]
        elif block_tensor in ("input_linear.weight", "experts.gate_up_proj"):
            gate_and_up = tensor if block_tensor.startswith("input") else tensor.transpose(1, 2)
            gate, up = gate_and_up.chunk(2, dim=1)
            gguf_tensors |= {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
        elif block_tensor in ("output_linear.weight", "experts.down_proj"):
            down = tensor if block_tensor.startswith("output") else tensor.transpose(1, 2)
            gguf_tensors[f"{block}.ffn_down_exps.weight"] = down
        elif shared_match is not None:
            gguf_tensors[f"{block}.ffn_{EXPERT_MATRICES[shared_match[1]]}_shexp.{shared_match[2]}"] = tensor
        elif block_tensor in BLOCK_TENSORS:
            gguf_tensors[f"{block}.{BLOCK_TENSORS[block_tensor]}"] = tensor.flatten()
        else:
            stem, _, suffix = block_tensor.rpartition(".")
            gguf_name = BLOCK_TENSORS[stem]
            if config["model_type"] == "granitemoe" and gguf_name in ("attn_q", "attn_k"):
                tensor = interleave_halves(
                    tensor, config[f"num_{'attention' if gguf_name == 'attn_q' else 'key_value'}_heads"]
                )
            if config["model_type"] == "glm4_moe" and gguf_name == "ffn_norm":
                gguf_name = "post_attention_norm"
            tensor = tensor.flatten() if gguf_name == "ffn_gate_inp_shexp" else tensor
            gguf_tensors[f"{block}.{gguf_name}.{suffix}"] = tensor
    return gguf_tensors


def convert_to_gguf(checkpoint: Path, file: Path, **metadata: Any) -> Path:
    """Convert a checkpoint to a GGUF file. ``metadata`` has additional keys with integers."""
    config = json.loads((checkpoint / "config.json").read_text())
    family = config["model_type"]
    expert_count_keys = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    config["num_local_experts"] = next(config[key] for key in expert_count_keys if key in config)
    writer = GGUFWriter(file, GGUF_ARCHITECTURES[family])
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config.get("intermediate_size_mlp") or config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config.get("moe_k") or config["num_experts_per_tok"])
    expert_size = config["intermediate_size"] if family in ("minimax_m2", "llama4_text") else None
    writer.add_expert_feed_forward_length(expert_size or config.get("moe_intermediate_size") or 1)
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if family == "granitemoe":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if family in ("glm4_moe", "minimax_m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family == "glm4_moe":
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if family == "ernie4_5_moe":
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    if family == "llama4_text":
        writer.add_interleave_moe_layer_step(2)
        writer.add_uint32("llama4.attention.temperature_length", config["floor_scale"])
        writer.add_float32("llama4.attention.temperature_scale", config["attn_scale"])
    for key, value in metadata.items():
        writer.add_uint32(f"{GGUF_ARCHITECTURES[family]}.{key}", value)
    for name, tensor in convert_tensors(load_file(checkpoint / "model.safetensors"), config).items():
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    write_and_close(writer)
    return file


def write_family_checkpoint(family: str, folder: Path) -> Path:
    (tiny_config,) = (decoder.tiny_config for decoder in DECODERS if decoder.name == family)
    assert tiny_config is not None
    return write_checkpoint(folder, tiny_config() | CONFIG_CHANGES.get(family, {}))


@pytest.mark.parametrize("family", GGUF_ARCHITECTURES)
def test_logits_equal_the_logits_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    checkpoint = write_family_checkpoint(family, tmp_path)
    file = convert_to_gguf(checkpoint, tmp_path / "m.gguf")
    tokens = random_tokens(40, 130, seed=2)
    logits = [step_logits(open_pipeline(path), [make_context(tokens)])[0] for path in (checkpoint, file)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen2_moe", "expert_group_count", 2),
        ("granitemoe", "expert_shared_feed_forward_length", 64),
        ("minimax_m2", "expert_shared_count", 1),
        ("olmoe", "leading_dense_block_count", 1),
        ("glm4_moe", "nextn_predict_layers", 3),
        ("ernie4_5_moe", "expert_gating_func", 2),
    ],
)
def test_unsupported_keys_are_refused(family: str, key: str, value: int, tmp_path: Path) -> None:
    file = convert_to_gguf(write_family_checkpoint(family, tmp_path), tmp_path / "m.gguf", **{key: value})
    with pytest.raises(WeightsError, match=key):
        gguf_config(file)
