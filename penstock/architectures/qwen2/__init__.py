"""Dense Qwen 2 and Qwen 2.5 models, and models distilled into them: text, embeddings and speech."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture, speech_architectures
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: biases, and a window in the last layer."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 2,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }


ARCHITECTURES = (
    SupportedArchitecture(
        name="qwen2",
        task=PipelineTask.TEXT_GENERATION,
        pipeline_model="model:Qwen2Model",
        example_repo_ids=("Qwen/Qwen2.5-0.5B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
        tiny_config=tiny_config,
    ),
    SupportedArchitecture(
        name="qwen2",
        task=PipelineTask.EMBEDDINGS_GENERATION,
        pipeline_model="embedder:Qwen2Embedder",
        example_repo_ids=("Alibaba-NLP/gte-Qwen2-1.5B-instruct",),
        tiny_config=tiny_config,
    ),
    *speech_architectures("qwen2", "model:Qwen2Model", tiny_config, ("neuphonic/neutts-air",)),
)
