"""Estimates the memory of a model from the headers of its checkpoint. No tensor data is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING

from penstock.dtype import DType
from penstock.kernels import backend
from penstock.kernels.encodings import encoding_named
from penstock.memory.demand import max_logit_rows, requested_step_tokens
from penstock.weights.safetensors import QuantizedHeader, TensorHeader

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig
    from penstock.kernels import LinearEncoding
    from penstock.kernels.encodings import LayerRole
    from penstock.nn import TensorNames

_ROWS_PER_TOKEN = 6
"""Rows of activations per token of a step, see `estimate_activation_memory`."""
_BYTES_PER_LOGIT = 20
"""Bytes of logits and sampling data per token of the vocabulary, for each row of logits."""
_MAX_ENCODER_CACHE_BYTES = 256 * 2**20


def estimate_weights_size(
    pipeline_config: PipelineConfig,
    names: TensorNames | None = None,
    *,
    share: Callable[[str], float] = lambda name: 1.0,
) -> int:
    """Return the size in bytes of the loaded weights, with each layer in the encoding of the loaded model.

    Linear layers and the output head are counted in packed form. Layers that the model fuses are counted
    separately, so the estimate can be slightly too high. Embedding tables, norms and biases are counted in
    the type of the activations, although some families store norm weights ``1 + w`` in float32. An output
    head that is tied to the embedding table is packed in addition to the table. For families that store
    weights as ``[in, out]``, the size of the scales is not exact. The packed size is that of the first back
    end of `BackendRegistry.candidates`, even if this back end cannot run and another back end is opened.

    Args:
        pipeline_config: contains the checkpoint and the encoding.
        names: the tensor names of the family; by default the names of Llama.
        share: returns the fraction of a matrix that is on a rank, given the name of the matrix; by default 1.
    """
    names = _names_or_default(names)
    model = pipeline_config.model
    kernels = backend.BACKENDS.candidates(model.devices[0].device_type, model.kernels)[0]
    float_dtype = _encoding(pipeline_config).compute_dtype.value
    size = 0.0
    for name, header in model.tensor_headers.items():
        if names.is_unread(name):
            continue
        role = names.role(name)
        shape = _linear_shape(name, header, names)
        if shape:
            *experts, out_features, in_features = shape
            encoding = _router_encoding(names, float_dtype) if role == "router" else model.encoding
            if model.keeps_stored_layers:
                encoding = header.encoding or float_dtype
            elif encoding != header.encoding:
                layer_role: LayerRole = "values" if role == "values" else "linear"
                if role != "values" and (experts or role == "expert"):
                    layer_role = "expert"
                encoding = encoding_named(encoding).for_layer(layer_role, out_features, in_features)
            num_bytes = kernels.num_bytes(encoding_named(encoding), out_features, in_features)
            size += prod(experts) * num_bytes * share(name)
            if model.keeps_stored_layers and isinstance(header, QuantizedHeader):
                size += len(header.input_order)
        elif role != "head":
            size += _unpacked_size(header, float_dtype) * (share(name) if role == "table" else 1)
    default_encoding = _encoding(pipeline_config)
    head_shapes = _head_shapes(pipeline_config, names)
    table = f"{names.embedding_path}.weight"
    # Without an embedding table in the checkpoint, the table is a copy of the head.
    if not any(names.is_embedding(name) for name in model.tensor_headers):
        size += sum(prod(shape) for shape in head_shapes) * DType(float_dtype).size_in_bytes * share(table)
    stored_encoding = _stored_head_encoding(pipeline_config, names)
    for vocabulary, hidden in head_shapes:
        encoding = stored_encoding or default_encoding.for_layer("head", vocabulary, hidden)
        num_bytes = kernels.num_bytes(encoding_named(encoding), vocabulary, hidden)
        size += num_bytes * share(f"{names.head}.weight")
    return int(size)


def estimate_packed_size(pipeline_config: PipelineConfig) -> int:
    """Return the approximate size in bytes of the weights that are packed during loading.

    The packed weights are the linear layers and the output head. The caller has not imported torch yet, so
    neither the kernels nor the tensor names of the family are known. A matrix with one row per token of the
    vocabulary is assumed to be an embedding table or an output head. The result is 0 for an encoding that
    packs lazily (`penstock.kernels.LazyWeight`) without calibration.
    """
    model, encoding = pipeline_config.model, _encoding(pipeline_config)
    if encoding.packs_lazily and not encoding.needs_calibration:
        return 0
    vocabulary = model.huggingface_config.vocabulary_size
    num_linear_weights, vocabulary_matrix_sizes = 0, []
    for header in model.tensor_headers.values():
        shape = _matrix_shape(header)
        if shape and shape[0] == vocabulary:
            vocabulary_matrix_sizes.append(prod(shape))
        elif shape:
            num_linear_weights += prod(shape)
    # The output head is packed, tables of embeddings are not. A table can be wider than the head.
    num_head_weights = min(vocabulary_matrix_sizes, default=0)
    return int((num_linear_weights + num_head_weights) * encoding.bits_per_weight / 8)


def estimate_activation_memory(
    pipeline_config: PipelineConfig,
    huggingface_config: HuggingFaceConfig,
    names: TensorNames | None = None,
    *,
    min_step_tokens: int = 0,
) -> int:
    """Return the size in bytes of the activations of the largest step.

    Each token of the step needs six rows with the width of the widest linear layer: three rows for a gated
    feed-forward layer, and one row each for the residual stream, the sum of residual stream and layer output,
    and the norm of this sum. Each sequence and each draft token needs a row of logits and sampling data, with
    20 bytes per token of the vocabulary.

    Args:
        pipeline_config: contains the checkpoint, the encoding and the limits of a step.
        huggingface_config: the checkpoint's configuration.
        names: the tensor names of the family; by default the names of Llama.
        min_step_tokens: minimum number of tokens of the largest step.
    """
    bytes_per_element = _encoding(pipeline_config).compute_dtype.size_in_bytes
    shapes = _linear_shapes(pipeline_config, _names_or_default(names))
    max_width = max((max(shape[-2:]) for shape in shapes), default=0)
    row_bytes = (
        max(requested_step_tokens(pipeline_config), min_step_tokens)
        * _ROWS_PER_TOKEN
        * max_width
        * bytes_per_element
    )
    return row_bytes + max_logit_rows(pipeline_config) * huggingface_config.vocabulary_size * _BYTES_PER_LOGIT


def estimate_adapters_size(pipeline_config: PipelineConfig, names: TensorNames | None = None) -> int:
    """Return the size in bytes of the device slots for LoRA adapters; 0 if adapters are not enabled.

    Each of the ``max_loras`` slots has matrices of rank ``max_lora_rank`` for all linear layers and the head.

    Args:
        pipeline_config: contains the checkpoint and the limits for adapters.
        names: the tensor names of the family; by default the names of Llama.
    """
    config = pipeline_config.lora
    if not config.is_enabled:
        return 0
    names = _names_or_default(names)
    shapes = [*_linear_shapes(pipeline_config, names), *_head_shapes(pipeline_config, names)]
    total_width = sum(prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)
    bytes_per_element = _encoding(pipeline_config).compute_dtype.size_in_bytes
    return config.max_loras * config.max_lora_rank * total_width * bytes_per_element


def encoder_cache_size(pipeline_config: PipelineConfig, free_memory: int) -> int:
    """Return the size in bytes of the cache of encoded images.

    This is the configured size, or by default 1/20 of the free memory, but at most 256 MiB.
    """
    configured_size = pipeline_config.vision.encoder_cache_memory
    if configured_size is not None:
        return configured_size
    return min(_MAX_ENCODER_CACHE_BYTES, free_memory // 20)


def _names_or_default(names: TensorNames | None) -> TensorNames:
    from penstock.nn import LLAMA_NAMES  # imports torch

    return names or LLAMA_NAMES


def _router_encoding(names: TensorNames, float_dtype: str) -> str:
    return DType.float32.value if names.is_router_float32 else float_dtype


def _encoding(pipeline_config: PipelineConfig) -> LinearEncoding:
    return encoding_named(pipeline_config.model.encoding)


def _head_shapes(pipeline_config: PipelineConfig, names: TensorNames) -> list[tuple[int, ...]]:
    """Return ``[V, E]`` of the output head, or of the embedding table if the checkpoint has no head."""
    headers = pipeline_config.model.tensor_headers
    heads = [header.shape for name, header in headers.items() if names.role(name) == "head"]
    return heads or [header.shape for name, header in headers.items() if names.is_embedding(name)]


def _stored_head_encoding(pipeline_config: PipelineConfig, names: TensorNames) -> str | None:
    """Return the stored encoding of the output head if the model keeps stored encodings, otherwise None."""
    model = pipeline_config.model
    if not model.keeps_stored_layers:
        return None
    headers = model.tensor_headers
    encodings = [header.encoding for name, header in headers.items() if names.role(name) == "head"]
    return encodings[0] if encodings else None


def _linear_shapes(pipeline_config: PipelineConfig, names: TensorNames) -> Iterator[tuple[int, ...]]:
    for name, header in pipeline_config.model.tensor_headers.items():
        shape = _linear_shape(name, header, names)
        if shape:
            yield shape


def _linear_shape(name: str, header: TensorHeader, names: TensorNames) -> tuple[int, ...] | None:
    """Return the shape of a linear layer (see `_matrix_shape`); None for tables, head and other tensors."""
    return None if names.role(name) in ("table", "head") else _matrix_shape(header)


def _matrix_shape(header: TensorHeader) -> tuple[int, ...] | None:
    """Return the shape ``[out, in]`` of a matrix or ``[N, out, in]`` of N experts; None for other tensors."""
    return header.shape if len(header.shape) in (2, 3) and header.is_float else None


def _unpacked_size(header: TensorHeader, dtype: str) -> int:
    """Return the size in bytes of a tensor that is not packed. Floats are converted to ``dtype``."""
    if header.is_float:
        return header.num_elements * DType(dtype).size_in_bytes
    return header.num_bytes
