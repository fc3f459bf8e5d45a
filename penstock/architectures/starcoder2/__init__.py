"""StarCoder 2."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: layer norms and biases in all layers, and a window."""
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "norm_epsilon": 1e-05,
        "use_bias": True,
        "sliding_window": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="starcoder2",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Starcoder2Model",
    example_repo_ids=(
        "bigcode/starcoder2-3b",
        "bigcode/starcoder2-15b",
    ),
    tiny_config=tiny_config,
)
