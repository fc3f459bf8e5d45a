"""Logits of prompts of 2600 tokens, whole and in chunks, equal transformers in every decoder family."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import DECODERS, load_in_transformers, transformers_logits, write_checkpoint
from support.pipeline_steps import append_token, make_context, open_pipeline, random_tokens, step_logits

from penstock.architectures.registry import SupportedArchitecture

pytestmark = pytest.mark.slow

LENGTH = 2600
TOLERANCES = {
    **dict.fromkeys(("gemma", "gemma4_text"), 2e-4),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), 4e-4),
}
"""Maximum error of a family in standard deviations of the logits; 1e-4 for all other families.

In Gemma and Gemma 4, transformers differs from a float64 computation by more than 1e-4. With linear
attention, the results of transformers change by more than 1e-4 if its sums are computed in another order.
"""
CHUNKS = [1, 600, 999, 1000]
_MAX_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "original_max_position_embeddings")


@pytest.mark.parametrize("architecture", DECODERS, ids=lambda architecture: architecture.name)
def test_logits_of_long_prompts_equal_transformers(
    architecture: SupportedArchitecture, tmp_path: Path
) -> None:
    config = architecture.tiny_config()
    config |= {name: 4096 for name in _MAX_LENGTH_KEYS if name in config}
    config.setdefault("max_position_embeddings", 4096)
    write_checkpoint(tmp_path, config)
    reference = load_in_transformers(tmp_path)
    tokens = random_tokens(LENGTH, reference.config.vocab_size, seed=5)
    expected = transformers_logits(reference, tokens)
    tolerance = TOLERANCES.get(architecture.name, 1e-4) * max(1.0, float(expected.std()))
    pipeline = open_pipeline(tmp_path, kv_cache_block_size=16, num_threads=1, max_batch_input_tokens=LENGTH)
    for chunks in ([LENGTH], CHUNKS):
        context = make_context(tokens, log_probabilities_echo=True)
        for chunk in chunks:
            start = context.start_idx
            context.set_token_indices(active_idx=start + chunk)
            logits = step_logits(pipeline, [context])[0]
            error = (logits - expected[start : start + chunk]).abs().max()
            assert error <= tolerance, (chunk, start)
            append_token(pipeline, context, 0)
        pipeline.release(context)
