"""`GGUFFamily`: the tensor names of a model family in GGUF files, and how its weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """The tensor names of a family, and how its GGUF files differ from Hugging Face checkpoints."""

    names: Mapping[str, str]
    """Name in the GGUF file -> name in the checkpoint, both without ``.weight`` and ``.bias``.

    ``N`` stands for the number of a layer, ``X`` for the number of an expert or a head.
    """
    is_interleaved: bool = False
    """Whether the file stores query and key rows interleaved for the rotary embedding."""
    is_transposed: bool = False
    """Whether the checkpoint stores the matrices of the layers as ``[in, out]``."""
    norm_offset: float = 0.0
    """The constant that the file adds to the weights of norms."""
    orders_qkv_by_head: bool = False
    """Whether the checkpoint orders the fused QKV matrix by head: query, key and value of head 0, then of
    head 1.
    """
    vectors: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Vectors: name in the file -> full name and number of dims in the checkpoint.

    The name in the file has no suffix ``.weight`` or ``.bias``. A vector with two dims is a matrix of one row
    in the checkpoint.
    """
    fused_experts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Matrices of experts with the rows of two matrices: name in the file -> names of the upper and the lower
    half in the checkpoint, as in `names`.
    """


LLAMA: dict[str, str] = {
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
POST_NORMS: dict[str, str] = {
    "blk.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
    "blk.N.post_ffw_norm": "model.layers.N.post_feedforward_layernorm",
}
