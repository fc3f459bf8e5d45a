"""Task pipelines, which turn a batch of contexts into outputs, and the names of Modular's `max.pipelines`.

The names in ``__all__`` are loaded on first use: importing this package loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names

if TYPE_CHECKING:
    from penstock.architectures.decoder import DecoderModel
    from penstock.architectures.model import KVCacheMixin, ModelInputs, ModelOutputs, PipelineModel
    from penstock.architectures.registry import PIPELINE_REGISTRY, SupportedArchitecture
    from penstock.config import (
        KVCacheConfig,
        ModelConfig,
        PipelineConfig,
        SamplingConfig,
        SpeculativeConfig,
        upper_bounded_default,
    )
    from penstock.memory import MemoryPlan
    from penstock.pipelines.text_generation import TextGenerationPipeline
    from penstock.text.detokenizer import Detokenizer
    from penstock.text.tokenizer import TextTokenizer

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

_NAMES_BY_MODULE = {
    "penstock.architectures.decoder": ("DecoderModel",),
    "penstock.architectures.model": ("KVCacheMixin", "ModelInputs", "ModelOutputs", "PipelineModel"),
    "penstock.architectures.registry": ("PIPELINE_REGISTRY", "SupportedArchitecture"),
    "penstock.config": (
        "KVCacheConfig",
        "ModelConfig",
        "PipelineConfig",
        "SamplingConfig",
        "SpeculativeConfig",
        "upper_bounded_default",
    ),
    "penstock.memory": ("MemoryPlan",),
    "penstock.pipelines.text_generation": ("TextGenerationPipeline",),
    "penstock.text.detokenizer": ("Detokenizer",),
    "penstock.text.tokenizer": ("TextTokenizer",),
}


if not TYPE_CHECKING:  # with __getattr__, type checkers would accept missing names
    __getattr__ = lazy_names(
        __name__, {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
