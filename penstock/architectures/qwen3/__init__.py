"""Dense Qwen 3 models: text generation, embeddings, reranking and speech."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture, speech_architectures
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: a head size other than hidden / heads."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    }


ARCHITECTURES = (
    SupportedArchitecture(
        name="qwen3",
        task=PipelineTask.TEXT_GENERATION,
        pipeline_model="model:Qwen3Model",
        example_repo_ids=("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"),
        tiny_config=tiny_config,
    ),
    SupportedArchitecture(
        name="qwen3",
        task=PipelineTask.EMBEDDINGS_GENERATION,
        pipeline_model="embedder:Qwen3Embedder",
        tokenizer="penstock.architectures.qwen3.tokenizer:Qwen3EmbeddingsTokenizer",
        example_repo_ids=("Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Reranker-0.6B"),
        tiny_config=tiny_config,
    ),
    *speech_architectures("qwen3", "model:Qwen3Model", tiny_config, ()),
)
