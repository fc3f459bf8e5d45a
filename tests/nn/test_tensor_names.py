"""Roles of tensors, derived from a family's tensor names."""

from __future__ import annotations

import pytest

from penstock.architectures.gpt2.config import NAMES as GPT2_NAMES
from penstock.nn import LLAMA_NAMES, TensorNames

OTHER_NAMES = TensorNames(
    prefix="decoder.",
    embedding="words",
    head="output",
    block="block_{layer}",
    qkv=("query", "key", "value"),
    router="choose",
    experts="bank",
    other_tables=("places.weight",),
)


@pytest.mark.parametrize(
    ("names", "tensor", "role"),
    [
        (LLAMA_NAMES, "model.embed_tokens.weight", "table"),
        (LLAMA_NAMES, "embed_tokens.weight", "table"),
        (LLAMA_NAMES, "lm_head.weight", "head"),
        (LLAMA_NAMES, "model.layers.0.self_attn.q_proj.weight", "linear"),
        (LLAMA_NAMES, "model.layers.0.self_attn.v_proj.weight", "values"),
        (LLAMA_NAMES, "model.layers.0.mlp.gate.weight", "router"),
        (LLAMA_NAMES, "model.layers.0.mlp.gate_proj.weight", "linear"),
        (LLAMA_NAMES, "model.layers.0.mlp.experts.3.up_proj.weight", "expert"),
        (GPT2_NAMES, "transformer.wte.weight", "table"),
        (GPT2_NAMES, "wpe.weight", "table"),
        (GPT2_NAMES, "h.0.attn.c_attn.weight", "linear"),
        (GPT2_NAMES, "h.0.attn.v_proj.weight", "linear"),
        (OTHER_NAMES, "decoder.words.weight", "table"),
        (OTHER_NAMES, "decoder.places.weight", "table"),
        (OTHER_NAMES, "output.weight", "head"),
        (OTHER_NAMES, "decoder.block_1.attn.value.weight", "values"),
        (OTHER_NAMES, "decoder.block_1.attn.v_proj.weight", "linear"),
        (OTHER_NAMES, "decoder.block_1.choose.weight", "router"),
        (OTHER_NAMES, "decoder.block_1.bank.0.up.weight", "expert"),
        (OTHER_NAMES, "lm_head.weight", "linear"),
    ],
)
def test_the_role_follows_from_the_name(names: TensorNames, tensor: str, role: str) -> None:
    assert names.role(tensor) == role


def test_full_names_include_the_prefix() -> None:
    assert LLAMA_NAMES.embedding_path == "model.embed_tokens"
    assert LLAMA_NAMES.norm_path == "model.norm"
    assert LLAMA_NAMES.block_path(3) == "model.layers.3"
    assert OTHER_NAMES.block_path(3) == "decoder.block_3"


def test_fused_matrices_have_no_value_projection() -> None:
    assert TensorNames(qkv=("qkv_proj",)).values is None
    assert LLAMA_NAMES.values == "v_proj"
