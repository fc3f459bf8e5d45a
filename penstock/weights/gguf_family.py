"""`GGUFFamily`: the names and the stored numbers of a family of models in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """How a family names and stores its tensors."""

    names: Mapping[str, str]
    """Name in the file -> name on the hub. ``N`` is the number of a layer, ``X`` the number of an expert."""
    is_interleaved: bool = False
    """Whether query and key rows are interleaved for the rotary embedding."""
    is_transposed: bool = False
    norm_excess: float = 0.0
    """Constant that the file adds to the weights of norms."""
    has_fused_heads: bool = False
    """Whether the fused matrix of a checkpoint is ordered by head: query, key and value of each."""
    vectors: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Vectors: name in the file without suffix -> full name and number of dimensions on the hub.

    A vector with two dimensions is a matrix of one row on the hub.
    """


LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.N.attn_norm": "model.layers.N.input_layernorm",
    "blk.N.attn_q": "model.layers.N.self_attn.q_proj",
    "blk.N.attn_k": "model.layers.N.self_attn.k_proj",
    "blk.N.attn_v": "model.layers.N.self_attn.v_proj",
    "blk.N.attn_output": "model.layers.N.self_attn.o_proj",
    "blk.N.attn_q_norm": "model.layers.N.self_attn.q_norm",
    "blk.N.attn_k_norm": "model.layers.N.self_attn.k_norm",
    "blk.N.ffn_norm": "model.layers.N.post_attention_layernorm",
    "blk.N.ffn_gate": "model.layers.N.mlp.gate_proj",
    "blk.N.ffn_up": "model.layers.N.mlp.up_proj",
    "blk.N.ffn_down": "model.layers.N.mlp.down_proj",
}
POST_NORMS = {
    "blk.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
    "blk.N.post_ffw_norm": "model.layers.N.post_feedforward_layernorm",
}
