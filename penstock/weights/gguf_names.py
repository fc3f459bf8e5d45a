"""The tensors of GGUF files under the names, and in the shapes, that checkpoints from the hub have.

One table a family. Where a file holds numbers in another order, a `GGUFTensor` says so, and reading it
puts them back: rows of queries and keys that stand in pairs for the rotation, matrices that GPT-2 keeps
transposed, Gemma's norms that are 1 more, all experts of a layer in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.dtype import DType
from penstock.errors import UnknownArchitectureError, WeightsError
from penstock.weights.gguf import GGUFFile, StoredTensor
from penstock.weights.safetensors import TensorHeader

READABLE_BLOCKS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
"""The types of blocks that can be read; `gguf_blocks` reads them."""

_FLOATS = {"F16": DType.float16, "BF16": DType.bfloat16, "F32": DType.float32, "F64": DType.float64}


@dataclass(frozen=True, slots=True)
class GGUFTensor(TensorHeader):
    """One tensor of a GGUF file, or one expert's part of it, as a checkpoint from the hub has it."""

    offset: int = 0  # bytes from the start of the file
    heads: int = 0
    """Number of heads of the rows, if rows that are rotated together lie side by side; otherwise 0."""
    excess: float = 0.0
    """What the file adds to the weight."""

    @property
    def dtype(self) -> DType | None:
        """The type in which the tensor is read: blocks become float32."""
        return DType.float32 if self.type_name in READABLE_BLOCKS else _FLOATS.get(self.type_name)


@dataclass(frozen=True, slots=True)
class _Family:
    names: Mapping[str, str]
    """The file's names, ``N`` for the number of a block, to those of the hub; ``X`` for that of an expert."""
    is_paired: bool = False
    """Whether rows of queries and keys stand in pairs."""
    is_transposed: bool = False
    norm_excess: float = 0.0


_LLAMA = {
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
_AROUND = {
    "blk.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
    "blk.N.post_ffw_norm": "model.layers.N.post_feedforward_layernorm",
}
_GEMMA = _LLAMA | _AROUND | {"blk.N.ffn_norm": "model.layers.N.pre_feedforward_layernorm"}
_MIXTRAL = _LLAMA | {
    "blk.N.ffn_gate_inp": "model.layers.N.block_sparse_moe.gate",
    "blk.N.ffn_gate_exps": "model.layers.N.block_sparse_moe.experts.X.w1",
    "blk.N.ffn_up_exps": "model.layers.N.block_sparse_moe.experts.X.w3",
    "blk.N.ffn_down_exps": "model.layers.N.block_sparse_moe.experts.X.w2",
}
_QWEN3_MOE = _LLAMA | {
    "blk.N.ffn_gate_inp": "model.layers.N.mlp.gate",
    "blk.N.ffn_gate_exps": "model.layers.N.mlp.experts.X.gate_proj",
    "blk.N.ffn_up_exps": "model.layers.N.mlp.experts.X.up_proj",
    "blk.N.ffn_down_exps": "model.layers.N.mlp.experts.X.down_proj",
}
_PHI3 = _LLAMA | {
    "blk.N.attn_qkv": "model.layers.N.self_attn.qkv_proj",
    "blk.N.ffn_up": "model.layers.N.mlp.gate_up_proj",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.N.attn_norm": "transformer.h.N.ln_1",
    "blk.N.attn_qkv": "transformer.h.N.attn.c_attn",
    "blk.N.attn_output": "transformer.h.N.attn.c_proj",
    "blk.N.ffn_norm": "transformer.h.N.ln_2",
    "blk.N.ffn_up": "transformer.h.N.mlp.c_fc",
    "blk.N.ffn_down": "transformer.h.N.mlp.c_proj",
}

_FAMILIES = {
    "llama": _Family(_MIXTRAL, is_paired=True),  # Llama, Mistral and, with experts, Mixtral
    "granite": _Family(_LLAMA, is_paired=True),
    "smollm3": _Family(_LLAMA, is_paired=True),
    "qwen2": _Family(_LLAMA),
    "qwen3": _Family(_LLAMA),
    "qwen3moe": _Family(_QWEN3_MOE),
    "olmo2": _Family(_LLAMA | _AROUND),
    "phi3": _Family(_PHI3),
    "gemma2": _Family(_GEMMA, norm_excess=1.0),
    "gemma3": _Family(_GEMMA, norm_excess=1.0),
    "gpt2": _Family(_GPT2, is_transposed=True),
}

_WITHOUT_WEIGHTS = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd.*"
)
"""Tensors that are not needed: the configuration gives the frequencies of the rotary embedding."""


def read_gguf_headers(path: Path) -> dict[str, TensorHeader]:
    """The tensors of a GGUF file by the names that the hub's checkpoints of its family have.

    A tensor that the family does not have keeps the file's name.

    Raises:
        WeightsError: the file is damaged, or holds a type that cannot be read.
        UnknownArchitectureError: nothing is known of its family.
    """
    file = GGUFFile(path)
    name = architecture_of(file)
    family, heads = _FAMILIES[name], _heads(file, name)
    return {
        header_name: header
        for tensor in file.tensors.values()
        if not _WITHOUT_WEIGHTS.fullmatch(tensor.name)
        for header_name, header in _headers(tensor, family, heads)
    }


def architecture_of(file: GGUFFile) -> str:
    """The family of a file, as the format calls it.

    Raises:
        UnknownArchitectureError: nothing is known of it.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in _FAMILIES:
        raise UnknownArchitectureError(file.path, name, _FAMILIES)
    return name


def _heads(file: GGUFFile, architecture: str) -> dict[str, int]:
    """How many heads the rows of queries and of keys are of."""
    queries = file.metadata.get(f"{architecture}.attention.head_count")
    keys = file.metadata.get(f"{architecture}.attention.head_count_kv", queries)
    for count in (queries, keys):
        if type(count) is not int or count < 1:
            problem = f"{architecture}.attention.head_count and head_count_kv must be numbers, has {count!r}"
            raise WeightsError(file.path, problem)
    return {"attn_q": queries, "attn_k": keys}


def _headers(
    tensor: StoredTensor, family: _Family, heads: Mapping[str, int]
) -> Iterator[tuple[str, GGUFTensor]]:
    if tensor.block_type.name not in (*READABLE_BLOCKS, *_FLOATS):
        raise WeightsError(
            tensor.file,
            f"{tensor.name} is of type {tensor.block_type.name}: readable are "
            f"{', '.join((*_FLOATS, *READABLE_BLOCKS))}",
        )
    stem, _, kind = tensor.name.rpartition(".")  # kind is weight or bias
    block = re.match(r"blk\.(\d+)\.", stem)
    layer = block[1] if block else "N"
    name = family.names.get(re.sub(r"^blk\.\d+\.", "blk.N.", stem))
    header = GGUFTensor(
        tensor.file,
        tensor.block_type.name,
        tensor.shape,
        tensor.num_bytes,
        tensor.name,
        offset=tensor.offset,
    )
    if name is None:
        yield tensor.name, header
        return
    part = stem.rpartition(".")[2]
    if family.is_paired and part in heads:
        header = replace(header, heads=heads[part])
    if family.is_transposed and block and len(tensor.shape) == 2:
        header = replace(header, is_transposed=True, shape=tensor.shape[::-1])
    if part.endswith("norm") and kind == "weight":
        header = replace(header, excess=family.norm_excess)
    for expert, one in _experts(header) if "X" in name else [("X", header)]:
        yield f"{name.replace('.N.', f'.{layer}.').replace('.X.', f'.{expert}.')}.{kind}", one


def _experts(header: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
    """Each expert's part of a tensor of all; they lie one behind the other."""
    if len(header.shape) != 3:
        raise WeightsError(
            header.file, f"{header.stored_name} is of shape {list(header.shape)}, not of 3 dims"
        )
    num_bytes = header.num_bytes // header.shape[0]
    for expert in range(header.shape[0]):
        offset = header.offset + expert * num_bytes
        yield (
            str(expert),
            replace(header, shape=header.shape[1:], num_bytes=num_bytes, offset=offset),
        )
