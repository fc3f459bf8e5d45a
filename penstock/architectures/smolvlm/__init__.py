"""SmolVLM and SmolVLM2 for images; videos are refused. They have the network of Idefics3."""

from __future__ import annotations

from penstock.architectures.idefics3 import tiny_config as idefics3_config
from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests."""
    return idefics3_config() | {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "scale_factor": 4,
    }


ARCHITECTURE = SupportedArchitecture(
    name="smolvlm",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:SmolVLMModel",
    media="media:SmolVLMFamily",
    example_repo_ids=(
        "HuggingFaceTB/SmolVLM-256M-Instruct",
        "HuggingFaceTB/SmolVLM-500M-Instruct",
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
    ),
    tiny_config=tiny_config,
)
