"""Steps of a text pipeline with access to the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.kv_cache import KVCacheManager, restart
from penstock.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextGenerationPipeline
from penstock.pipelines.core import SamplingParams, TextContext


def open_pipeline(
    checkpoint: Path | str,
    *,
    members: Mapping[str, Any] | None = None,
    kernels: str = "best",
    **config: Any,
) -> TextGenerationPipeline:
    """Open the pipeline of a checkpoint, in float32 by default.

    Args:
        checkpoint: the folder of the checkpoint.
        members: attributes of the model class to override.
        kernels: name of the back end, or ``best`` for the default.
        config: settings of the pipeline under flat names.
    """
    values = {"model_path": str(checkpoint), "quantization_encoding": "float32", "max_batch_size": 8}
    if kernels != "best":
        values["kernels"] = kernels
    pipeline_config = PipelineConfig.from_flat(values | config)
    model = pipeline_config.model
    architecture = PIPELINE_REGISTRY.retrieve_architecture(model.huggingface_config, checkpoint)
    pipeline_model = architecture.load_pipeline_model()
    if members is not None:
        pipeline_model = type(f"Altered{pipeline_model.__name__}", (pipeline_model,), dict(members))
    return TextGenerationPipeline(pipeline_config, pipeline_model, -1)


def make_context(tokens: Sequence[int], max_new_tokens: int = 100, **fields: Any) -> TextContext:
    """Return a context with these prompt tokens that ends only at its maximum length."""
    sampling = fields.pop("sampling_params", SamplingParams())
    return TextContext(
        prompt=list(tokens),
        max_length=len(tokens) + max_new_tokens,
        tokens=np.array(tokens, dtype=np.int64),
        ignore_eos=True,
        sampling_params=sampling,
        **fields,
    )


def random_tokens(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Return ``count`` random tokens of a vocabulary."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocabulary, count)]


def step_logits(pipeline: TextGenerationPipeline, contexts: Sequence[TextContext]) -> list[torch.Tensor]:
    """Return the logits ``[rows, V]`` of the active tokens of each context, from one forward.

    Contexts with stale keys are restarted. No token is appended to the contexts.
    """
    kv = pipeline.kv
    assert isinstance(kv, KVCacheManager)
    for context in contexts:
        if kv.is_stale(context):
            restart(kv, context)
        kv.claim(context)
        kv.reserve(context)
    counts = [context.active_length for context in contexts]
    model: Any = pipeline.model
    inputs = model.prepare_initial_token_inputs([contexts], kv.inputs(contexts), counts)
    outputs = model.execute(inputs)
    return list(outputs.logits.float().cpu().split(counts))


def append_token(pipeline: TextGenerationPipeline, context: TextContext, token: int) -> None:
    """Append the next token to a context and commit its blocks."""
    context.update(token)
    pipeline.kv.commit(context)


def chunked_logits(
    pipeline: TextGenerationPipeline,
    context: TextContext,
    chunks: Sequence[int],
    other_lengths: Sequence[int] = (),
) -> torch.Tensor:  # [T, V]
    """Return the logits ``[T, V]`` after each prompt token, computed in chunks. Release the context.

    The batch of each chunk also contains new contexts with the lengths ``other_lengths``.
    """
    rows = []
    for index, chunk in enumerate(chunks):
        context.set_token_indices(active_idx=context.start_idx + chunk)
        batch = [make_context(random_tokens(n, 130, seed=n + index)) for n in other_lengths]
        logits = step_logits(pipeline, [*batch, context])
        rows.append(logits[-1])
        append_token(pipeline, context, 0)
        for other_context in batch:
            pipeline.release(other_context)
    pipeline.release(context)
    return torch.cat(rows)


def generate_tokens(
    pipeline: TextGenerationPipeline, contexts: Sequence[TextContext], num_steps: int = 1
) -> list[list[int]]:
    """Run the contexts as one batch until all end. Release them and return their output tokens."""
    tokens: dict[str, list[int]] = {context.request_id: [] for context in contexts}
    running_contexts = {context.request_id: context for context in contexts}
    while running_contexts:
        for request_id, response in pipeline.execute(running_contexts, num_steps).items():
            tokens[request_id] += [int(token.next_token) for token in response.tokens]
            if response.is_done:
                pipeline.release(running_contexts.pop(request_id))
    pipeline.kv.check_integrity()
    return [tokens[context.request_id] for context in contexts]
