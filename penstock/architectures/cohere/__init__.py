"""Command R, Command R+, Aya 23 and Aya Expanse."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: norms of queries and keys with weights for each head."""
    return {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.37,
        "use_qk_norm": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="cohere",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:CohereModel",
    example_repo_ids=(
        "CohereLabs/c4ai-command-r-v01",
        "CohereLabs/aya-expanse-8b",
    ),
    tiny_config=tiny_config,
)
