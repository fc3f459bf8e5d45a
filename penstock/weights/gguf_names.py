"""Maps GGUF tensors to the names and shapes of Hugging Face checkpoints. There is one table per family.

`GGUFTensor` records how the stored weights differ from the checkpoint. Reading the tensor reverts these
differences:

- query and key rows that are interleaved for the rotary embedding,
- fused QKV rows that the checkpoint orders by head,
- matrices that GPT-2's checkpoint stores transposed,
- norm weights to which the file adds 1,
- one tensor for all experts of a layer, or for the norms of all heads,
- one matrix for the gate and the up matrix of an expert,
- vectors that the checkpoint stores with leading dimensions of size 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.dtype import DType
from penstock.errors import UnknownArchitectureError, WeightsError
from penstock.weights.gguf import GGUFFile, StoredTensor
from penstock.weights.gguf_dense_names import DENSE_FAMILIES
from penstock.weights.gguf_family import LLAMA, POST_NORMS, GGUFFamily
from penstock.weights.gguf_gemma4 import GEMMA4_FAMILY
from penstock.weights.gguf_moe_names import MOE_FAMILIES
from penstock.weights.safetensors import TensorHeader

READABLE_BLOCKS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
"""Block types that `gguf_blocks` can read without the package ``gguf``."""

PACKAGE_BLOCKS = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("TQ1_0", "TQ2_0"),
)
"""Block types that the Python package ``gguf`` reads, which contains the tables of values of these types."""

_FLOATS = {"F16": DType.float16, "BF16": DType.bfloat16, "F32": DType.float32, "F64": DType.float64}


@dataclass(frozen=True, slots=True)
class GGUFTensor(TensorHeader):
    """A tensor of a GGUF file, or its part for one expert or head, with the shape in the checkpoint."""

    num_interleaved_heads: int = 0
    """Number of heads if the rows are interleaved for the rotary embedding; otherwise 0."""
    num_fused_heads: int = 0
    """Number of heads if the file stores the rows of all queries, then of all keys, then of all values, and
    the checkpoint orders these rows by head; otherwise 0.
    """
    weight_offset: float = 0.0
    """The constant that the file adds to the weight."""

    @property
    def dtype(self) -> DType | None:
        """The element type of the tensor after reading: float32 for block types, None for an unknown type."""
        is_block = self.type_name in READABLE_BLOCKS or self.type_name in PACKAGE_BLOCKS
        return DType.float32 if is_block else _FLOATS.get(self.type_name)

    @property
    def is_dequantized(self) -> bool:
        return self.encoding is None and self.type_name not in _FLOATS

    def rows(self, start: int, stop: int) -> GGUFTensor | None:
        """Return the header of the rows ``start`` to ``stop - 1`` of a matrix.

        Returns None if the rows are not contiguous, or if the tensor is not a matrix.
        """
        if len(self.shape) != 2 or self.is_transposed or self.num_fused_heads:
            return None
        row_bytes = self.num_bytes // self.shape[0]
        head_dim = self.shape[0] // self.num_interleaved_heads if self.num_interleaved_heads else 1
        if start % head_dim or stop % head_dim:
            return None  # the rows of a head are interleaved, so a part of a head is not contiguous
        return replace(
            self,
            shape=(stop - start, self.shape[1]),
            num_bytes=row_bytes * (stop - start),
            offset=self.offset + row_bytes * start,
            num_interleaved_heads=(stop - start) // head_dim if self.num_interleaved_heads else 0,
        )


_GEMMA = LLAMA | POST_NORMS | {"blk.N.ffn_norm": "model.layers.N.pre_feedforward_layernorm"}
_MIXTRAL = LLAMA | {
    "blk.N.ffn_gate_inp": "model.layers.N.block_sparse_moe.gate",
    "blk.N.ffn_gate_exps": "model.layers.N.block_sparse_moe.experts.X.w1",
    "blk.N.ffn_up_exps": "model.layers.N.block_sparse_moe.experts.X.w3",
    "blk.N.ffn_down_exps": "model.layers.N.block_sparse_moe.experts.X.w2",
}
_QWEN3_MOE = LLAMA | {
    "blk.N.ffn_gate_inp": "model.layers.N.mlp.gate",
    "blk.N.ffn_gate_exps": "model.layers.N.mlp.experts.X.gate_proj",
    "blk.N.ffn_up_exps": "model.layers.N.mlp.experts.X.up_proj",
    "blk.N.ffn_down_exps": "model.layers.N.mlp.experts.X.down_proj",
}
_PHI3 = LLAMA | {
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
    "llama": GGUFFamily(_MIXTRAL, is_interleaved=True),  # Llama, Mistral and, with experts, Mixtral
    "granite": GGUFFamily(LLAMA, is_interleaved=True),
    "smollm3": GGUFFamily(LLAMA, is_interleaved=True),
    "qwen2": GGUFFamily(LLAMA),
    "qwen3": GGUFFamily(LLAMA),
    "qwen3moe": GGUFFamily(_QWEN3_MOE),
    "olmo2": GGUFFamily(LLAMA | POST_NORMS),
    "phi3": GGUFFamily(_PHI3),
    "gemma2": GGUFFamily(_GEMMA, norm_offset=1.0),
    "gemma3": GGUFFamily(_GEMMA, norm_offset=1.0),
    "gemma4": GEMMA4_FAMILY,
    "gpt2": GGUFFamily(_GPT2, is_transposed=True),
    **DENSE_FAMILIES,
    **MOE_FAMILIES,
}

_IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd.*")
"""Tensors that are not weights of the model. `gguf_config` reads the factors of the rotary embedding."""


def read_gguf_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a GGUF file by their names in Hugging Face checkpoints.

    A tensor that is not in the table of the family keeps its name. Tensors that are not weights are omitted.

    Raises:
        WeightsError: the file is damaged, its head counts are not positive integers, or it has a tensor of an
            unreadable type or an unexpected shape.
        UnknownArchitectureError: the architecture is unknown.
    """
    file = GGUFFile(path)
    name = read_architecture(file)
    family = _FAMILIES[name]
    has_row_order = family.is_interleaved or family.orders_qkv_by_head
    num_heads = _num_heads_by_name(file, name) if has_row_order else {}
    return {
        header_name: header
        for tensor in file.tensors.values()
        if not _IGNORED.fullmatch(tensor.name)
        for header_name, header in _headers(tensor, family, num_heads)
    }


def read_architecture(file: GGUFFile) -> str:
    """Return the ``general.architecture`` of a file.

    Raises:
        UnknownArchitectureError: the architecture is unknown.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in _FAMILIES:
        raise UnknownArchitectureError(file.path, name, _FAMILIES)
    return name


def _num_heads_by_name(file: GGUFFile, architecture: str) -> dict[str, int]:
    """Return the numbers of query heads and of key heads, under the keys ``attn_q`` and ``attn_k``.

    Raises:
        WeightsError: a number is missing or is not a positive integer.
    """
    num_query_heads = file.metadata.get(f"{architecture}.attention.head_count")
    num_kv_heads = file.metadata.get(f"{architecture}.attention.head_count_kv", num_query_heads)
    num_heads = {}
    for name, value in (("attn_q", num_query_heads), ("attn_k", num_kv_heads)):
        num_heads[name] = value if isinstance(value, int) else 0
        if num_heads[name] < 1:
            keys = f"{architecture}.attention.head_count and head_count_kv"
            raise WeightsError(file.path, f"{keys} must be positive integers, not {value!r}")
    return num_heads


def _headers(
    tensor: StoredTensor, family: GGUFFamily, num_heads: Mapping[str, int]
) -> Iterator[tuple[str, GGUFTensor]]:
    """Yield (name in the checkpoint, header) of a tensor, or of each of its parts for one expert or head."""
    if tensor.block_type.name not in (*READABLE_BLOCKS, *PACKAGE_BLOCKS, *_FLOATS):
        raise WeightsError(
            tensor.file,
            f"{tensor.name} has type {tensor.block_type.name}, which cannot be read: use one of "
            f"{', '.join((*_FLOATS, *READABLE_BLOCKS, *PACKAGE_BLOCKS))}",
        )
    stem, suffix = _split_name(tensor.name)
    block = re.match(r"blk\.(\d+)\.", stem)
    layer = block[1] if block else "N"
    generic_name = re.sub(r"^blk\.\d+\.", "blk.N.", stem)
    name = family.names.get(generic_name)
    header = GGUFTensor(
        tensor.file,
        tensor.block_type.name,
        tensor.shape,
        tensor.num_bytes,
        tensor.name,
        offset=tensor.offset,
    )
    if generic_name in family.fused_experts and len(tensor.shape) == 3:
        for expert, part_header in _parts_per_expert_or_head(header):
            half = part_header.shape[0] // 2
            for index, name in enumerate(family.fused_experts[generic_name]):
                rows = part_header.rows(index * half, (index + 1) * half)
                assert rows is not None
                yield f"{name}.{suffix}".replace(".N.", f".{layer}.").replace(".X.", f".{expert}."), rows
        return
    if name is None:
        yield _convert_vector(header, family)
        return
    part = stem.rpartition(".")[2]
    if family.is_interleaved and part in num_heads:
        header = replace(header, num_interleaved_heads=num_heads[part])
    if part == "attn_qkv" and family.orders_qkv_by_head:
        header = replace(header, num_fused_heads=num_heads["attn_q"])
    if family.is_transposed and block and len(tensor.shape) == 2:
        header = replace(header, is_transposed=True, shape=tensor.shape[::-1])
    if part.endswith("norm") and suffix == "weight":
        header = replace(header, weight_offset=family.norm_offset)
    for expert, part_header in _parts_per_expert_or_head(header) if "X" in name else [("X", header)]:
        full_name = f"{name}.{suffix}".replace(".N.", f".{layer}.").replace(".X.", f".{expert}.")
        yield full_name, part_header


def _split_name(name: str) -> tuple[str, str]:
    """Return a tensor name without its suffix ``.weight`` or ``.bias``, and the suffix without the dot.

    The suffix is empty if the name has another end.
    """
    stem, _, suffix = name.rpartition(".")
    return (stem, suffix) if suffix in ("weight", "bias") else (name, "")


def _convert_vector(header: GGUFTensor, family: GGUFFamily) -> tuple[str, GGUFTensor]:
    """Return the name and header of a vector in `GGUFFamily.vectors`. Other tensors keep their names."""
    stem, _ = _split_name(header.stored_name)
    block = re.match(r"blk\.(\d+)\.", stem)
    name_and_dims = family.vectors.get(re.sub(r"^blk\.\d+\.", "blk.N.", stem))
    if name_and_dims is None or block is None or len(header.shape) > 2:
        return header.stored_name, header
    name, dimensions = name_and_dims
    shape = (1,) * (dimensions - 1) + header.shape[-1:]
    return name.replace(".N.", f".{block[1]}."), replace(header, shape=shape)


def _parts_per_expert_or_head(header: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
    """Yield (index, part) of a tensor that contains the matrices of all experts or the norms of all heads."""
    dimensions = 2 if header.stored_name.partition(".weight")[0].endswith("norm") else 3
    if len(header.shape) != dimensions:
        raise WeightsError(
            header.file, f"{header.stored_name} has shape {list(header.shape)}, not {dimensions} dimensions"
        )
    num_bytes = header.num_bytes // header.shape[0]
    for index in range(header.shape[0]):
        offset = header.offset + index * num_bytes
        yield (
            str(index),
            replace(header, shape=header.shape[1:], num_bytes=num_bytes, offset=offset),
        )
