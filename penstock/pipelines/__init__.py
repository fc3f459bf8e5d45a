"""Batches of contexts to tokens. The public names are loaded on first use: importing this loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.pipelines.config import (
        KVCacheConfig,
        ModelConfig,
        PipelineConfig,
        SamplingConfig,
        SpeculativeConfig,
        upper_bounded_default,
    )
    from penstock.pipelines.decoder import DecoderModel
    from penstock.pipelines.detokenizer import Detokenizer
    from penstock.pipelines.memory import MemoryPlan
    from penstock.pipelines.model import KVCacheMixin, ModelInputs, ModelOutputs, PipelineModel
    from penstock.pipelines.pipeline import TextGenerationPipeline
    from penstock.pipelines.registry import PIPELINE_REGISTRY, SupportedArchitecture
    from penstock.pipelines.tokenizer import TextTokenizer

__all__ = [
    "PIPELINE_REGISTRY",
    "DecoderModel",
    "Detokenizer",
    "KVCacheConfig",
    "KVCacheMixin",
    "MemoryPlan",
    "ModelConfig",
    "ModelInputs",
    "ModelOutputs",
    "PipelineConfig",
    "PipelineModel",
    "SamplingConfig",
    "SpeculativeConfig",
    "SupportedArchitecture",
    "TextGenerationPipeline",
    "TextTokenizer",
    "upper_bounded_default",
]

_HOMES = {
    "config": (
        "KVCacheConfig",
        "ModelConfig",
        "PipelineConfig",
        "SamplingConfig",
        "SpeculativeConfig",
        "upper_bounded_default",
    ),
    "decoder": ("DecoderModel",),
    "detokenizer": ("Detokenizer",),
    "memory": ("MemoryPlan",),
    "model": ("KVCacheMixin", "ModelInputs", "ModelOutputs", "PipelineModel"),
    "pipeline": ("TextGenerationPipeline",),
    "registry": ("PIPELINE_REGISTRY", "SupportedArchitecture"),
    "tokenizer": ("TextTokenizer",),
}


if not TYPE_CHECKING:  # who checks types is to notice names that are not there

    def __getattr__(name: str) -> object:
        for module, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
