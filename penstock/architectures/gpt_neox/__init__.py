"""GPT-NeoX and models of its architecture: Pythia, Dolly 2, RedPajama-INCITE."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: parallel attention and feed-forward, and partial RoPE."""
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": 96,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "layer_norm_eps": 1e-05,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="gpt_neox",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:GPTNeoXModel",
    example_repo_ids=(
        "EleutherAI/pythia-160m",
        "EleutherAI/gpt-neox-20b",
    ),
    tiny_config=tiny_config,
)
