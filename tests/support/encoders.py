"""Small encoders with random weights, saved and computed by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from support.checkpoints import skip_unknown_model_type
from support.published_checkpoints import rewrite_as_published, transformers_values

from penstock.architectures.registry import PIPELINE_REGISTRY, SupportedArchitecture
from penstock.assembly import load_pipeline
from penstock.config import PipelineConfig
from penstock.pipelines.core import EmbeddingsContext, EmbeddingsResponse, PipelineTask
from penstock.pipelines.embeddings import EmbeddingsPipeline

ENCODERS = PIPELINE_REGISTRY.of_task(PipelineTask.EMBEDDINGS_GENERATION)
"""The records of all embeddings architectures."""


def save_encoder(architecture: SupportedArchitecture, folder: Path, head: str, **changed_values: Any) -> Any:
    """Save a model with random weights and return it.

    Args:
        architecture: its tiny configuration is the configuration of the model.
        folder: the folder to write.
        head: the suffix of the auto class of transformers: ``""``, ``ForSequenceClassification`` or
            ``ForMaskedLM``.
        **changed_values: changed or added configuration values.
    """
    import transformers

    assert architecture.tiny_config is not None
    values = architecture.tiny_config() | changed_values
    values.pop("architectures", None)
    known_values = transformers_values(values)
    skip_unknown_model_type(known_values["model_type"])
    config = transformers.AutoConfig.for_model(**known_values)
    torch.manual_seed(0)
    auto_class = getattr(transformers, f"AutoModel{head}")
    model = auto_class.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # otherwise, biases would be 0 and norms 1
            parameter.add_(torch.randn_like(parameter) * 0.05)
        stored_tensors = model.state_dict()
        for name, buffer in model.named_buffers():  # some models store scale factors as buffers
            if name in stored_tensors and buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer) * 0.05)
    model.save_pretrained(folder)
    saved_model = auto_class.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    rewrite_as_published(folder, values, head)
    return saved_model


def open_encoder(folder: Path, **config: Any) -> EmbeddingsPipeline:
    """Return the pipeline of a saved encoder, in float32 unless ``config`` sets another encoding."""
    values = {"model_path": str(folder), "task": "embeddings-generation", "quantization_encoding": "float32"}
    return cast(EmbeddingsPipeline, load_pipeline(PipelineConfig.from_flat(values | config), None))


def embeddings_context(tokens: Any, request_id: str = "0", **fields: Any) -> EmbeddingsContext:
    """Return a context with these token ids."""
    ids = np.asarray(tokens)
    return EmbeddingsContext(
        request_id=request_id, prompt=ids.tolist(), tokens=ids, max_length=max(512, len(ids)), **fields
    )


def encode_all(pipeline: EmbeddingsPipeline, inputs: list[Any], **fields: Any) -> list[EmbeddingsResponse]:
    """Return the outputs of several inputs, computed as one batch."""
    batch = {str(i): embeddings_context(tokens, str(i), **fields) for i, tokens in enumerate(inputs)}
    return list(pipeline.encode(batch).values())
