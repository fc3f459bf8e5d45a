"""Conversion of test checkpoints to GGUF files, according to the format's specification.

The configuration, tensor names, row order, norm weights and tokenizers are converted. Matrices can also be
replaced by random quantized blocks.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, TokenType
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "olmo2": "olmo2",
    "granite": "granite",
    "smollm3": "smollm3",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt2": "gpt2",
    "olmo3": "olmo2",
    "gemma": "gemma",
    "glm4": "glm4",
    "glm": "chatglm",
    "ernie4_5": "ernie4_5",
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "arcee": "arcee",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "starcoder2": "starcoder2",
    "phi": "phi2",
    "stablelm": "stablelm",
    "gpt_neox": "gptneox",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "ministral3": "mistral3",
    "apertus": "apertus",
}
"""``model_type`` -> architecture name in GGUF files."""

_LAYER_MODULES = {
    "input_layernorm": "attn_norm",
    "attention_layernorm": "attn_norm",
    "feedforward_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_SANDWICH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_FAMILY_MODULES = {
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4"), _SANDWICH_NORMS),
    "gemma4_text": {
        **_SANDWICH_NORMS,
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "router.proj": "ffn_gate_inp",
    },
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
}
_GEMMA4_TENSORS = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
_EPS_KEYS = ("layer_norm_eps", "norm_epsilon", "norm_eps")
_INTERLEAVED_FAMILIES = ("llama", "mistral", "mixtral", "granite", "smollm3", "arcee", "olmo", "ministral3")
"""Families whose files interleave the halves of each query and key head."""
_MODEL_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.final_layernorm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}


def write_gguf(
    checkpoint: Path,
    file: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model of a checkpoint to one GGUF file.

    Args:
        checkpoint: a folder with config.json and model.safetensors.
        file: the file to write.
        kind: the type of matrices whose rows consist of whole blocks. Other matrices are F16, vectors F32.
        metadata: tokens and other metadata by key; see `add_metadata`.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    add_config(writer, config)
    add_metadata(writer, metadata or {})
    tensors = load_file(checkpoint / "model.safetensors")
    if config["model_type"] == "apertus":
        _add_activation(writer, tensors, config["num_hidden_layers"])
    if config["model_type"] == "gemma4_text":
        writer.add_tensor("rope_freqs.weight", _proportional_divisors(config))
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _frequency_divisors(config))
    for name, tensor in convert_tensors(tensors, config).items():
        tensor_type = GGMLQuantizationType.F32 if tensor.dim() == 1 else kind
        if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[tensor_type][0]:
            tensor_type = GGMLQuantizationType.F16
        writer.add_tensor(
            name, gguf.quants.quantize(tensor.float().numpy(), tensor_type), raw_dtype=tensor_type
        )
    write_and_close(writer)
    return file


def _add_activation(writer: GGUFWriter, tensors: Mapping[str, Tensor], num_layers: int) -> None:
    """Add the coefficients of Apertus' activation in each layer."""
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        stem = f"mlp.act_fn.{name}"
        values = [float(tensors[f"model.layers.{layer}.{stem}"]) for layer in range(num_layers)]
        getattr(writer, f"add_xielu_{name}")(values)


def _frequency_divisors(config: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:  # [D / 2]
    """Return the divisors ``[D / 2]`` of the rotary frequencies of Llama 3.1, which a GGUF tensor stores."""
    rope = config["rope_parameters"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    rotations = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    interpolation = np.clip((rotations - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - interpolation) / rope["factor"] + interpolation), dtype=np.float32)


def _proportional_divisors(config: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:  # [D / 2]
    """Return the divisors ``[D / 2]`` of the rotary frequencies of Gemma 4: 1, or 1e30 for no rotation."""
    head_dim = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]["head_dim"]
    fraction = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    pairs = np.arange(head_dim // 2)
    return np.where(pairs < int(fraction * head_dim / 2), 1.0, 1e30).astype(np.float32)


def write_and_close(writer: GGUFWriter) -> None:
    """Write the collected data and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Add metadata with the value types that GGUF converters use."""
    for key, value in metadata.items():
        value_type = {
            bool: GGUFValueType.BOOL,
            int: GGUFValueType.UINT32,
            float: GGUFValueType.FLOAT32,
            str: GGUFValueType.STRING,
            list: GGUFValueType.ARRAY,
        }[type(value)]
        writer.add_key_value(key, value, value_type)


def add_config(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Add the values of a ``config.json``: sizes, rotary embedding, and settings of single families."""
    if config["model_type"] == "gemma4_text":
        _add_gemma4_config(writer, config)
        return
    if config["model_type"] == "gpt2":
        sizes = ("n_positions", "n_embd", "n_layer", "n_head")
        positions, hidden, layers, heads = (config[name] for name in sizes)
        writer.add_feed_forward_length(config.get("n_inner") or 4 * hidden)
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        sizes = ("max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads")
        positions, hidden, layers, heads = (config[name] for name in sizes)
        head_dim = config.get("head_dim") or hidden // heads
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
        if "rms_norm_eps" in config:
            writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        else:
            eps = next((config[key] for key in _EPS_KEYS if key in config), 1e-5)
            writer.add_layer_norm_eps(eps)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * rotary_fraction(config)))
        _add_rope(writer, config)
    writer.add_context_length(positions)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    _add_variants(writer, config)


def _add_gemma4_config(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    layers, num_shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    sizes = [config["per_layer_config"].get(str(layer), {}) for layer in range(layers)]
    full = config["layer_types"].index("full_attention")
    for name in ("key", "value"):
        writer.add_uint32(f"gemma4.attention.{name}_length", sizes[full]["head_dim"])
        writer.add_uint32(f"gemma4.attention.{name}_length_swa", config["head_dim"])
    writer.add_rope_dimension_count(sizes[full]["head_dim"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(
        [size.get("num_key_value_heads", config["num_key_value_heads"]) for size in sizes]
    )
    factors = [
        1 + (config["use_double_wide_mlp"] and layer >= layers - num_shared) for layer in range(layers)
    ]
    writer.add_feed_forward_length([factor * config["intermediate_size"] for factor in factors])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_uint32("gemma4.attention.shared_kv_layers", num_shared)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", config["hidden_size_per_layer_input"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_float32(
        "gemma4.rope.freq_base_swa", config["rope_parameters"]["sliding_attention"]["rope_theta"]
    )
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def rotary_fraction(config: Mapping[str, Any]) -> float:
    """Return the fraction of the dimensions of a head that the rotary embedding rotates."""
    rope = config.get("rope_parameters") or {}
    return float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)


def _add_rope(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    full_rope = rope.get("full_attention", rope)
    if theta := full_rope.get("rope_theta", config.get("rope_theta")):
        writer.add_rope_freq_base(theta)
    if "sliding_attention" in rope and config["model_type"] != "olmo3":
        key = f"{ARCHITECTURES[config['model_type']]}.rope.freq_base_swa"
        writer.add_key_value(key, rope["sliding_attention"]["rope_theta"], GGUFValueType.FLOAT32)
    if full_rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full_rope["rope_type"]))
        writer.add_rope_scaling_factor(full_rope["factor"])
    if full_rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full_rope["original_max_position_embeddings"])
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(full_rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(full_rope["llama_4_scaling_beta"])


def _add_variants(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    family = config["model_type"]
    if config.get("sliding_window") and family not in ("qwen2", "qwen3", "qwen3_moe"):
        writer.add_sliding_window(config["sliding_window"])
    if family in ("cohere", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
    if family == "cohere2":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if family in ("stablelm", "gpt_neox"):
        writer.add_parallel_residual(config["use_parallel_residual"])
    if family == "olmo" and config["clip_qkv"]:
        writer.add_clamp_kqv(config["clip_qkv"])
    if family in ("olmo3", "exaone4") and config.get("sliding_window"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if family in ("gemma2", "gemma3_text"):
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
    if family in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if family == "qwen3_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def convert_tensors(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with the names and the layout of a GGUF file.

    Rows are reordered and norm weights are changed as in GGUF files. The matrices of experts are stacked.
    """
    family = config["model_type"]
    module_names = _LAYER_MODULES | _FAMILY_MODULES.get(family, {})
    result: dict[str, Tensor] = {}
    stacked: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue  # some checkpoints contain this tensor although it is tied
        stem, _, suffix = name.rpartition(".")
        if stem in _MODEL_TENSORS:
            result[f"{_MODEL_TENSORS[stem]}.{suffix}"] = _with_norm_offset(stem, tensor, family, suffix)
            continue
        if suffix not in ("weight", "bias"):
            stem = name
        match = re.fullmatch(r"(?:model\.layers|transformer\.h|gpt_neox\.layers)\.(\d+)\.(.*)", stem)
        assert match, name
        layer, module = match[1], match[2]
        if ".act_fn" in module:
            continue  # stored as metadata
        if module in _GEMMA4_TENSORS:
            result[f"blk.{layer}.{_GEMMA4_TENSORS[module]}"] = tensor
            continue
        if ".experts." in module:
            _, index, expert_module = module.rsplit(".", 2)
            stacked.setdefault(f"blk.{layer}.{_EXPERTS[expert_module]}.weight", {})[int(index)] = tensor
            continue
        # StableLM can have a norm for each head
        if match := re.fullmatch(r"self_attn\.([qk])_layernorm\.norms\.(\d+)", module):
            stacked.setdefault(f"blk.{layer}.attn_{match[1]}_norm.weight", {})[int(match[2])] = tensor
            continue
        tensor = _with_norm_offset(module, tensor, family, suffix)
        if module == "attention.query_key_value":
            # from Q, K, V of each head to Q of all heads, K of all heads, V of all heads
            heads = config["num_attention_heads"]
            tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2).contiguous()
        if family in _INTERLEAVED_FAMILIES:
            heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
            if module in heads:
                tensor = _interleave_halves(tensor, config[heads[module]])
        if family == "gpt2" and tensor.dim() == 2:
            tensor = tensor.T.contiguous()
        result[f"blk.{layer}.{module_names[module]}.{suffix}"] = tensor
    for name, matrices in stacked.items():
        result[name] = torch.stack([matrices[index] for index in range(len(matrices))])
    return result


def _with_norm_offset(module: str, tensor: Tensor, family: str, suffix: str) -> Tensor:
    if family == "nemotron":
        return tensor + 1 if module.endswith("norm") and suffix == "weight" else tensor
    adds_one = family in ("gemma", "gemma2", "gemma3_text")
    return tensor + 1 if adds_one and module.endswith("norm") else tensor


def _interleave_halves(rows: Tensor, heads: int) -> Tensor:
    """Interleave the two halves of each head's rows (``permute`` in the specification)."""
    interleaved = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2)
    return interleaved.reshape(rows.shape).contiguous()


def tokenizer_metadata(tokenizer: Mapping[str, Any], pre: str, *, size: int | None = None) -> dict[str, Any]:
    """Return the metadata of a byte-level BPE tokenizer.

    Args:
        tokenizer: the contents of a tokenizer.json.
        pre: the GGUF name of the pre-tokenizer.
        size: number of rows of the embedding table. Rows without a token get padding tokens.
    """
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    texts = {i: text for text, i in tokenizer["model"]["vocab"].items()}
    texts |= {i: token["content"] for i, token in added.items()}
    count = size or max(texts) + 1
    merges = tokenizer["model"]["merges"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in range(count)],
        "tokenizer.ggml.token_type": [int(_token_type(added.get(i), i in texts)) for i in range(count)],
    }
    if merges:
        merge_lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
        metadata["tokenizer.ggml.merges"] = merge_lines
    return metadata


def _token_type(added_token: Mapping[str, Any] | None, exists: bool) -> TokenType:
    if added_token is not None:
        return TokenType.CONTROL if added_token["special"] else TokenType.USER_DEFINED
    return TokenType.NORMAL if exists else TokenType.UNUSED


def sentencepiece_metadata(pieces: list[tuple[str, float]]) -> dict[str, Any]:
    """Return the metadata of a SentencePiece tokenizer whose first pieces are <unk>, <s> and </s>."""
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types += [
        TokenType.BYTE if re.fullmatch("<0x[0-9A-F]{2}>", piece) else TokenType.NORMAL
        for piece, _ in pieces[3:]
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.scores": [float(score) for _, score in pieces],
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def read_sentencepiece(model: Path) -> list[tuple[str, float]]:
    """Return the (piece, score) pairs of a SentencePiece model file, which is a protocol buffer."""
    data = model.read_bytes()

    def fields(start: int, end: int) -> Iterator[tuple[int, int, int]]:  # (field number, start, end)
        def varint(offset: int) -> tuple[int, int]:
            value, shift = 0, 0
            while True:
                value |= (data[offset] & 127) << shift
                shift, offset = shift + 7, offset + 1
                if data[offset - 1] < 128:
                    return value, offset

        while start < end:
            tag, start = varint(start)
            if tag & 7 == 0:
                stop = varint(start)[1]
            elif tag & 7 == 2:
                length, start = varint(start)
                stop = start + length
            else:
                stop = start + {1: 8, 5: 4}[tag & 7]
            yield tag >> 3, start, stop
            start = stop

    pieces = []
    for number, start, stop in fields(0, len(data)):
        if number == 1:
            piece_fields = {key: data[begin:end] for key, begin, end in fields(start, stop)}
            pieces.append((piece_fields[1].decode(), struct.unpack("<f", piece_fields.get(2, bytes(4)))[0]))
    return pieces


def random_blocks(shape: tuple[int, ...], block_type: str, rng: np.random.Generator) -> np.ndarray:
    """Return random quantized blocks of a matrix. Their scales have a typical magnitude."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[block_type]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, num_bytes), dtype=np.uint8)
    if block_type == "MXFP4":
        blocks[..., 0] = rng.integers(115, 122, blocks.shape[:-1])
        return blocks.reshape(*shape[:-1], -1)
    scale_offsets = {name: [0, 2] for name in ("Q4_K", "Q5_K", "Q4_1", "Q5_1")}
    offsets = (scale_offsets | {"Q6_K": [208], "TQ1_0": [52]}).get(block_type, [0])
    for start in offsets:
        scale = rng.uniform(1e-5, 1e-4, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., start : start + 2] = scale.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_random_blocks(checkpoint: Path, file: Path, block_types: Mapping[str, str]) -> dict[str, Tensor]:
    """Write a GGUF model with the sizes and vectors of a checkpoint, and with matrices of random blocks.

    Args:
        checkpoint: a folder with config.json and model.safetensors.
        file: the file to write.
        block_types: part of a GGUF tensor name -> type of its blocks; the first match is used.

    Returns:
        The tensors by checkpoint name, with the row order of the checkpoint. Matrices are dequantized.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    writer = GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    add_config(writer, config)
    random, values = np.random.default_rng(0), dict(tensors)
    for source_name, (name, tensor) in zip(tensors, convert_tensors(tensors, config).items(), strict=True):
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.float().numpy())
            continue
        type_name = next(type_name for pattern, type_name in block_types.items() if pattern in name)
        block_type = GGMLQuantizationType[type_name]
        blocks = random_blocks(tuple(tensor.shape), block_type.name, random)
        writer.add_tensor(name, blocks, raw_dtype=block_type)
        rows = torch.from_numpy(gguf.quants.dequantize(blocks, block_type))
        if ".q_proj." in source_name or ".k_proj." in source_name:
            heads = config["num_attention_heads" if ".q_proj." in source_name else "num_key_value_heads"]
            rows = rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
        values[source_name] = rows.contiguous()
    write_and_close(writer)
    return values
