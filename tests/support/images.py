"""Contexts with images, made from pixels without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.kv_cache import KVCacheManager, restart
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import ImageMetadata, TextAndVisionContext, TextContext, image_digest


def random_pixels(seed: int, size: int = 28) -> np.ndarray:
    """Return random pixels ``[3, size, size]`` in the format of an image processor."""
    return np.random.default_rng(seed).normal(size=(3, size, size)).astype(np.float32)


def image_context(
    tokens: Sequence[int],
    pixels: Sequence[np.ndarray],
    token_id: int,
    max_new_tokens: int = 20,
    **fields: Any,
) -> TextAndVisionContext:
    """Return a context in which each run of ``token_id`` is an image with the next of these pixels."""
    ids = np.array(tokens, dtype=np.int64)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], ids == token_id, [0]])))
    images = [
        ImageMetadata(
            start_idx=int(start), end_idx=int(end), pixel_values=image, image_hash=image_digest(image, {})
        )
        for (start, end), image in zip(edges.reshape(-1, 2), pixels, strict=True)
    ]
    return TextAndVisionContext(
        prompt=list(tokens),
        max_length=len(tokens) + max_new_tokens,
        tokens=ids,
        ignore_eos=True,
        images=images,
        vision_token_ids=[token_id],
        **fields,
    )


def forward_logits(pipeline: TextGenerationPipeline, contexts: Sequence[TextContext]) -> list[torch.Tensor]:
    """Return the logits ``[rows, V]`` of the active tokens of each context, from one forward."""
    kv = pipeline.kv
    assert isinstance(kv, KVCacheManager)
    for context in contexts:
        if kv.is_stale(context):
            restart(kv, context)
        kv.claim(context)
        kv.reserve(context)
    counts = [context.active_length for context in contexts]
    return list(pipeline.runner.forward(contexts, counts).float().cpu().split(counts))
