"""Tensor names of mixture-of-experts families in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.weights.gguf_family import LLAMA, GGUFFamily

_BLOCK = "model.layers.N"


def _experts(path: str, router: str, parts: tuple[str, str, str]) -> dict[str, str]:
    """Return GGUF name -> checkpoint name, for the router and the matrices of the experts.

    Args:
        path: the checkpoint's name of the experts within a block.
        router: the checkpoint's name of the router within a block.
        parts: the checkpoint's names of the gate, up and down matrix of an expert.
    """
    gate, up, down = (f"{_BLOCK}.{path}.X.{part}" for part in parts)
    return {
        "blk.N.ffn_gate_inp": f"{_BLOCK}.{router}",
        "blk.N.ffn_gate_exps": gate,
        "blk.N.ffn_up_exps": up,
        "blk.N.ffn_down_exps": down,
    }


def _shared_experts(path: str) -> dict[str, str]:
    """Return GGUF name -> checkpoint name, for the shared experts at ``path`` within a block."""
    return {f"blk.N.ffn_{short}_shexp": f"{_BLOCK}.{path}.{short}_proj" for short in ("gate", "up", "down")}


_LLAMA_PARTS = ("gate_proj", "up_proj", "down_proj")
_QWEN = LLAMA | _experts("mlp.experts", "mlp.gate", _LLAMA_PARTS)
_MIXTRAL = LLAMA | _experts("block_sparse_moe.experts", "block_sparse_moe.gate", ("w1", "w3", "w2"))
_GRANITE = LLAMA | _experts("block_sparse_moe.experts", "block_sparse_moe.router.layer", _LLAMA_PARTS)
_LLAMA4 = LLAMA | _experts("feed_forward.experts", "feed_forward.router", _LLAMA_PARTS)
_LLAMA4 |= {f"blk.N.ffn_{part}": f"{_BLOCK}.feed_forward.{part}_proj" for part in ("gate", "up", "down")}
_GLM_NORM = {"blk.N.post_attention_norm": f"{_BLOCK}.post_attention_layernorm"}
_DRAFT_LAYERS = {
    f"blk.N.nextn.{part}": f"{_BLOCK}.nextn.{part}"
    for part in ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm")
}
_CORRECTION_BIAS = "e_score_correction_bias"

MOE_FAMILIES: Mapping[str, GGUFFamily] = {
    "qwen2moe": GGUFFamily(
        _QWEN | _shared_experts("mlp.shared_expert"),
        vectors={"blk.N.ffn_gate_inp_shexp": (f"{_BLOCK}.mlp.shared_expert_gate.weight", 2)},
    ),
    "olmoe": GGUFFamily(_QWEN),
    "granitemoe": GGUFFamily(_GRANITE, is_interleaved=True),
    "glm4moe": GGUFFamily(
        _QWEN | _shared_experts("mlp.shared_experts") | _GLM_NORM | _DRAFT_LAYERS,
        vectors={"blk.N.exp_probs_b": (f"{_BLOCK}.mlp.gate.{_CORRECTION_BIAS}", 1)},
    ),
    "minimax-m2": GGUFFamily(
        _MIXTRAL, vectors={"blk.N.exp_probs_b": (f"{_BLOCK}.block_sparse_moe.{_CORRECTION_BIAS}", 1)}
    ),
    "ernie4_5-moe": GGUFFamily(
        _QWEN | _shared_experts("mlp.shared_experts"),
        vectors={"blk.N.exp_probs_b": (f"{_BLOCK}.mlp.moe_statics.{_CORRECTION_BIAS}", 2)},
    ),
    "phimoe": GGUFFamily(_MIXTRAL),
    "llama4": GGUFFamily(_LLAMA4 | _shared_experts("feed_forward.shared_expert")),
}
"""``general.architecture`` -> tensor names and storage options."""
