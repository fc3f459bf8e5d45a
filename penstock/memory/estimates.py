"""What a model will take, from the headers of its checkpoint's files: no tensor is read."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING

from penstock.dtype import DType
from penstock.memory.demand import wanted_logit_rows, wanted_step_size
from penstock.weights import mxfp4
from penstock.weights.safetensors import TensorHeader

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig
    from penstock.kernels import LinearEncoding

_OUTPUT_HEAD = "*lm_head.weight"
_TABLES = ("*embed_tokens.weight", "*wte.weight")
_UNPACKED = ("*embed*.weight", "*wte.weight", "*wpe.weight", "*shared.weight", "*_bias")
"""Matrices that are looked up, and biases of experts."""
_VALUES = "*v_proj.weight"
_EXPERTS = "*.experts.*.weight"
_ROUTERS = ("*.gate.weight", "*.router.weight")


def estimate_weights_size(pipeline_config: PipelineConfig) -> int:
    """Bytes that the weights take once loaded, in the encoding that they will have, or hardly more.

    Linear layers and the output head count as packed, those that are fused one by one; embedding tables,
    norms and biases in the type of the activations. An output head that is tied to the embedding is packed
    beside the table. Of families that store ``[in, out]`` only the scales are counted wrongly.
    """
    from penstock.kernels import encoding_named  # loads torch, and so does nn
    from penstock.nn import encoding_of_head, encoding_of_linear, encoding_of_values

    model = pipeline_config.model
    floats = _encoding(pipeline_config).compute_dtype.value
    size = 0
    for name, header in model.tensor_headers.items():
        shape = _linear_shape(name, header)
        if shape:
            *experts, out_features, in_features = shape
            encoding = floats if _is_one_of(name, _ROUTERS) else model.encoding
            if encoding != header.encoding:
                encoding = encoding_of_values(encoding) if fnmatchcase(name, _VALUES) else encoding
                is_expert = bool(experts) or fnmatchcase(name, _EXPERTS)
                encoding = encoding_of_linear(encoding, out_features, in_features, is_expert=is_expert)
            kind = encoding_named(encoding)
            size += prod(experts) * kind.num_bytes(out_features, in_features)
        elif not fnmatchcase(name, _OUTPUT_HEAD):
            size += _plain_size(name, header, floats)
    head = encoding_named(encoding_of_head(model.encoding))
    if not any(_is_one_of(name, _TABLES) for name in model.tensor_headers):  # the head is the table, too
        size += sum(prod(shape) for shape in _head_shapes(pipeline_config)) * DType(floats).size_in_bytes
    return size + sum(head.num_bytes(*shape) for shape in _head_shapes(pipeline_config))


def estimate_packed_size(pipeline_config: PipelineConfig) -> int:
    """Bytes that a load packs of linear layers and the output head, roughly, without a look at the kernels:
    it loads no torch. Floats are packed later, see `penstock.kernels.LazyWeight`."""
    model = pipeline_config.model
    shapes = [_linear_shape(name, header) for name, header in model.tensor_headers.items()]
    num_elements = sum(prod(shape) for shape in (*shapes, *_head_shapes(pipeline_config)) if shape)
    return int(num_elements * _BITS.get(model.encoding, 0) / 8)


_BITS = {"int8": 8, "int4": 5}
"""Of a weight, what its group has in common counted in: in int4 half a bit more in narrow layers, half a bit
less in others. Nothing is foretold of other encodings."""


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
    rows = wanted_step_size(pipeline_config) * 6 * widest * size
    return rows + wanted_logit_rows(pipeline_config) * huggingface_config.vocabulary_size * 20


def estimate_adapters_size(pipeline_config: PipelineConfig) -> int:
    """Bytes of the room for LoRA adapters that run at once: 0 where there are to be none.

    For each of ``max_loras`` adapters the matrices of every linear layer, at the largest rank there may be.
    """
    config = pipeline_config.lora
    if not config.is_enabled:
        return 0
    headers = pipeline_config.model.tensor_headers
    shapes = [shape for name, header in headers.items() if (shape := _linear_shape(name, header))]
    shapes += _head_shapes(pipeline_config)
    width = sum(prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)
    size = _encoding(pipeline_config).compute_dtype.size_in_bytes
    return config.max_loras * config.max_lora_rank * width * size


def _encoding(pipeline_config: PipelineConfig) -> LinearEncoding:
    from penstock.kernels import encoding_named  # loads torch

    return encoding_named(pipeline_config.model.encoding)


def _head_shapes(pipeline_config: PipelineConfig) -> list[tuple[int, ...]]:
    """``[V, E]`` of the output head: its own, or that of the table it is tied to."""
    headers = pipeline_config.model.tensor_headers
    heads = [header.shape for name, header in headers.items() if fnmatchcase(name, _OUTPUT_HEAD)]
    return heads or [header.shape for name, header in headers.items() if _is_one_of(name, _TABLES)]


def _linear_shape(name: str, header: TensorHeader) -> tuple[int, ...] | None:
    """``[out, in]`` or ``[N, out, in]`` of a linear layer or of N experts', once read; None for all else."""
    if header.type_name == "U8":
        return mxfp4.dequantized_shape(name, header.shape)
    is_matrix = len(header.shape) in (2, 3) and header.is_float
    return None if not is_matrix or _is_one_of(name, (*_UNPACKED, _OUTPUT_HEAD)) else header.shape


def _plain_size(name: str, header: TensorHeader, dtype: str) -> int:
    """Of what is not packed; numbers in the type of the activations."""
    if header.is_float:
        return header.num_elements * DType(dtype).size_in_bytes
    return 0 if mxfp4.is_scales(name, header) else header.num_bytes


def _is_one_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
