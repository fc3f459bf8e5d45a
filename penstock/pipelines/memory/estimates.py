"""What a model will take, from the headers of its checkpoint's files: no tensor is read."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING

from penstock.pipelines.memory.demand import wanted_logit_rows
from penstock.pipelines.weights import mxfp4
from penstock.pipelines.weights.safetensors import TensorHeader

if TYPE_CHECKING:
    from penstock.kernels import LinearEncoding
    from penstock.pipelines.config import HuggingFaceConfig, PipelineConfig

_OUTPUT_HEAD = "*lm_head.weight"
_UNPACKED = ("*embed*.weight", "*wte.weight", "*wpe.weight", "*shared.weight", "*_bias", _OUTPUT_HEAD)
"""Matrices that are looked up, biases of experts, and what stays in the activations' type for the quality of
the logits."""


def estimate_weights_size(pipeline_config: PipelineConfig) -> int:
    """Bytes that the weights take once loaded, in the encoding that they will have.

    Linear layers count as packed; embedding tables, the output head, norms and biases in the type of the
    activations; an output head that is tied to the embedding is counted once.
    """
    encoding = _encoding(pipeline_config)
    tied = pipeline_config.model.huggingface_config.get("tie_word_embeddings", False)
    return sum(
        _loaded_size(name, header, encoding)
        for name, header in pipeline_config.model.tensor_headers.items()
        if not (tied and fnmatchcase(name, _OUTPUT_HEAD))
    )


def estimate_activation_memory(pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> int:
    """Bytes that the activations of the largest step take.

    For each of ``max_batch_input_tokens`` tokens six rows as wide as the widest linear layer: a gated
    feed-forward layer holds three of them, beside the residual stream, its sum and its norm. And for each
    sequence of the batch, and each draft, a row of logits with what sampling makes of it: 20 bytes a token of
    the vocabulary.
    """
    size = _encoding(pipeline_config).compute_dtype.size_in_bytes
    shapes = (_linear_shape(name, header) for name, header in pipeline_config.model.tensor_headers.items())
    widest = max((max(shape[-2:]) for shape in shapes if shape), default=0)
    text_config = huggingface_config.section("text_config") or huggingface_config  # of more than text
    vocabulary = text_config.count("vocab_size", default=0)
    rows = pipeline_config.max_batch_input_tokens * 6 * widest * size
    return rows + wanted_logit_rows(pipeline_config) * vocabulary * 20


def estimate_adapters_size(pipeline_config: PipelineConfig) -> int:
    """Bytes of the room for LoRA adapters that run at once: 0 where there are to be none.

    For each of ``max_loras`` adapters the matrices of every linear layer, at the largest rank there may be.
    """
    config = pipeline_config.lora
    if not config.is_enabled:
        return 0
    headers = pipeline_config.model.tensor_headers
    shapes = [shape for name, header in headers.items() if (shape := _linear_shape(name, header))]
    heads = [header.shape for name, header in headers.items() if fnmatchcase(name, _OUTPUT_HEAD)]
    tables = [
        header.shape
        for name, header in headers.items()
        if any(fnmatchcase(name, table) for table in ("*embed_tokens.weight", "*wte.weight"))
    ]
    shapes += heads or tables  # a tied head has the table's shape
    width = sum(prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)
    size = _encoding(pipeline_config).compute_dtype.size_in_bytes
    return config.max_loras * config.max_lora_rank * width * size


def _encoding(pipeline_config: PipelineConfig) -> LinearEncoding:
    from penstock.kernels import encoding_named  # loads torch

    return encoding_named(pipeline_config.model.encoding)


def _linear_shape(name: str, header: TensorHeader) -> tuple[int, ...] | None:
    """``[out, in]`` or ``[N, out, in]`` of a linear layer or of N experts', once read; None for all else."""
    if header.type_name == "U8":
        return mxfp4.dequantized_shape(name, header.shape)
    is_matrix = len(header.shape) in (2, 3) and header.is_float
    return None if not is_matrix or any(fnmatchcase(name, one) for one in _UNPACKED) else header.shape


def _loaded_size(name: str, header: TensorHeader, encoding: LinearEncoding) -> int:
    shape = _linear_shape(name, header)
    if shape:
        return prod(shape[:-2]) * encoding.num_bytes(*shape[-2:])
    if header.is_float:
        return header.num_elements * encoding.compute_dtype.size_in_bytes
    return 0 if mxfp4.is_scales(name, header) else header.num_bytes
