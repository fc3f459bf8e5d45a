"""Tensor names of dense families in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.weights.gguf_family import LLAMA, POST_NORMS, GGUFFamily

_LLAMA_POST_NORM = LLAMA | POST_NORMS
_FUSED_GATE_UP = {"blk.N.ffn_up": "model.layers.N.mlp.gate_up_proj"}
_GLM4_NORMS = {
    "blk.N.post_attention_norm": "model.layers.N.post_self_attn_layernorm",
    "blk.N.post_ffw_norm": "model.layers.N.post_mlp_layernorm",
}
_PLAIN_MLP = {
    "blk.N.ffn_up": "model.layers.N.mlp.c_fc",
    "blk.N.ffn_down": "model.layers.N.mlp.c_proj",
}
_PHI = {
    "output_norm": "model.final_layernorm",
    "blk.N.attn_output": "model.layers.N.self_attn.dense",
    "blk.N.ffn_up": "model.layers.N.mlp.fc1",
    "blk.N.ffn_down": "model.layers.N.mlp.fc2",
}
_HUNYUAN = {
    "blk.N.attn_q_norm": "model.layers.N.self_attn.query_layernorm",
    "blk.N.attn_k_norm": "model.layers.N.self_attn.key_layernorm",
}
_APERTUS = {
    "blk.N.attn_norm": "model.layers.N.attention_layernorm",
    "blk.N.ffn_norm": "model.layers.N.feedforward_layernorm",
}
_STABLELM = {
    "blk.N.attn_q_norm": "model.layers.N.self_attn.q_layernorm.norms.X",
    "blk.N.attn_k_norm": "model.layers.N.self_attn.k_layernorm.norms.X",
}
_GPT_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "blk.N.attn_norm": "gpt_neox.layers.N.input_layernorm",
    "blk.N.attn_qkv": "gpt_neox.layers.N.attention.query_key_value",
    "blk.N.attn_output": "gpt_neox.layers.N.attention.dense",
    "blk.N.ffn_norm": "gpt_neox.layers.N.post_attention_layernorm",
    "blk.N.ffn_up": "gpt_neox.layers.N.mlp.dense_h_to_4h",
    "blk.N.ffn_down": "gpt_neox.layers.N.mlp.dense_4h_to_h",
}

DENSE_FAMILIES: Mapping[str, GGUFFamily] = {
    "gemma": GGUFFamily(LLAMA, norm_offset=1.0),
    "glm4": GGUFFamily(LLAMA | _FUSED_GATE_UP | _GLM4_NORMS),
    "chatglm": GGUFFamily(LLAMA | _FUSED_GATE_UP),
    "ernie4_5": GGUFFamily(LLAMA),
    "seed_oss": GGUFFamily(LLAMA | {"blk.N.post_attention_norm": "model.layers.N.post_attention_layernorm"}),
    "exaone4": GGUFFamily(_LLAMA_POST_NORM),
    "arcee": GGUFFamily(LLAMA, is_interleaved=True),
    "command-r": GGUFFamily(LLAMA),
    "cohere2": GGUFFamily(LLAMA),
    "hunyuan-dense": GGUFFamily(LLAMA | _HUNYUAN),
    "starcoder2": GGUFFamily(LLAMA | _PLAIN_MLP),
    "phi2": GGUFFamily(LLAMA | _PHI),
    "stablelm": GGUFFamily(LLAMA | _STABLELM),
    "gptneox": GGUFFamily(_GPT_NEOX, orders_qkv_by_head=True),
    "nemotron": GGUFFamily(LLAMA, norm_offset=1.0),
    "olmo": GGUFFamily(LLAMA, is_interleaved=True),
    "mistral3": GGUFFamily(LLAMA, is_interleaved=True),
    "apertus": GGUFFamily(LLAMA | _APERTUS),
}
"""``general.architecture`` -> tensor names and storage options."""
