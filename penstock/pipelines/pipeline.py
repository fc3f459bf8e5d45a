"""Re-exports `TextGenerationPipeline` and the model interface under their `max.pipelines.pipeline` names."""

from __future__ import annotations

from penstock.architectures.model import KVCacheMixin, ModelInputs, ModelOutputs, PipelineModel
from penstock.pipelines.text_generation import TextGenerationPipeline

__all__ = [
    "KVCacheMixin",
    "ModelInputs",
    "ModelOutputs",
    "PipelineModel",
    "TextGenerationPipeline",
]
