"""InternLM 3 with biases on queries, keys and values only; the reference is Qwen 2 in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from support.checkpoints import load_in_transformers, transformers_logits, write_checkpoint
from support.pipeline_steps import make_context, open_pipeline, random_tokens, step_logits

MODEL_CONFIG = {
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 130,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def test_logits_with_qkv_biases_equal_qwen2(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, MODEL_CONFIG | {"model_type": "qwen2"})
    tokens = random_tokens(60, 130, seed=1)
    expected = transformers_logits(load_in_transformers(folder), tokens)
    internlm_values = {"model_type": "internlm3", "architectures": ["InternLM3ForCausalLM"]}
    (folder / "config.json").write_text(
        json.dumps(MODEL_CONFIG | internlm_values | {"qkv_bias": True, "bias": False})
    )
    logits = step_logits(open_pipeline(folder), [make_context(tokens, log_probabilities_echo=True)])[0]
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
