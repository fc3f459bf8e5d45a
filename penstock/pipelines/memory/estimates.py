"""What a model will take, from the headers of its checkpoint's files: no tensor is read."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING

from penstock.pipelines.memory.demand import wanted_logit_rows
from penstock.pipelines.weights.safetensors import TensorHeader

if TYPE_CHECKING:
    from penstock.kernels import LinearEncoding
    from penstock.pipelines.config import HuggingFaceConfig, PipelineConfig

_OUTPUT_HEAD = "*lm_head.weight"
_UNPACKED = ("*embed*.weight", "*wte.weight", "*wpe.weight", "*shared.weight", _OUTPUT_HEAD)
"""Matrices that are looked up, or that stay in the activations' type for the quality of the logits."""


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
    linears = [
        header for name, header in pipeline_config.model.tensor_headers.items() if _is_linear(name, header)
    ]
    widest = max((header.shape[-2] for header in linears), default=0)
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
    shapes = [header.shape for name, header in headers.items() if _is_linear(name, header)]
    heads = [header.shape for name, header in headers.items() if fnmatchcase(name, _OUTPUT_HEAD)]
    tables = [header.shape for name, header in headers.items() if fnmatchcase(name, "*embed_tokens.weight")]
    shapes += heads or tables  # a tied head has the table's shape
    width = sum(prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)
    size = _encoding(pipeline_config).compute_dtype.size_in_bytes
    return config.max_loras * config.max_lora_rank * width * size


def _encoding(pipeline_config: PipelineConfig) -> LinearEncoding:
    from penstock.kernels import encoding_named  # loads torch

    return encoding_named(pipeline_config.model.encoding)


def _is_linear(name: str, header: TensorHeader) -> bool:
    matrices = len(header.shape) in (2, 3) and header.is_float
    return matrices and not any(fnmatchcase(name, pattern) for pattern in _UNPACKED)


def _loaded_size(name: str, header: TensorHeader, encoding: LinearEncoding) -> int:
    if _is_linear(name, header):
        *experts, out_features, in_features = header.shape
        matrices = experts[0] if experts else 1
        return matrices * encoding.num_bytes(out_features, in_features)
    if header.is_float:
        return header.num_elements * encoding.compute_dtype.size_in_bytes
    return header.num_bytes
