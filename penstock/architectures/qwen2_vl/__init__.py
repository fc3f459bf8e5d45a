"""Qwen2-VL for images of any size; videos are refused."""

from __future__ import annotations

from penstock.architectures.qwen2_5_vl import tiny_config as qwen2_5_vl_config
from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests."""
    config = qwen2_5_vl_config()
    text = config["text_config"]
    assert isinstance(text, dict)
    return config | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "text_config": text | {"model_type": "qwen2_vl_text"},
        "vision_config": {
            "depth": 2,
            "embed_dim": 48,
            "hidden_size": 48,
            "mlp_ratio": 2,
            "num_heads": 3,
            "patch_size": 4,
        },
    }


ARCHITECTURE = SupportedArchitecture(
    name="qwen2_vl",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Qwen2VisionModel",
    media="media:Qwen2VisionFamily",
    example_repo_ids=("Qwen/Qwen2-VL-2B-Instruct", "Qwen/Qwen2-VL-7B-Instruct"),
    tiny_config=tiny_config,
)
