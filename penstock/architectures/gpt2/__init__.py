"""GPT-2 and models of its architecture: DistilGPT2, DialoGPT."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 3,
        "n_inner": None,
        "n_positions": 256,
        "vocab_size": 130,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="gpt2",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:GPT2Model",
    example_repo_ids=("openai-community/gpt2", "distilbert/distilgpt2"),
    tiny_config=tiny_config,
)
