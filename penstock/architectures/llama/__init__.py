"""Llama: Llama 1 to 3.3, TinyLlama, SmolLM and other models with ``model_type`` ``llama``."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture, speech_architectures
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: grouped-query attention, sizes that are not powers of two."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


ARCHITECTURES = (
    SupportedArchitecture(
        name="llama",
        task=PipelineTask.TEXT_GENERATION,
        pipeline_model="model:LlamaModel",
        example_repo_ids=("meta-llama/Llama-3.2-1B-Instruct", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        tiny_config=tiny_config,
    ),
    SupportedArchitecture(
        name="llama",
        task=PipelineTask.EMBEDDINGS_GENERATION,
        pipeline_model="embedder:LlamaEmbedder",
        example_repo_ids=("nvidia/llama-nemotron-embed-1b-v2",),
        tiny_config=tiny_config,
    ),
    *speech_architectures(
        "llama", "model:LlamaModel", tiny_config, ("canopylabs/orpheus-3b-0.1-ft", "neuphonic/neutts-nano")
    ),
)
