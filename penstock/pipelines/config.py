"""Re-exports `penstock.config`. Names are resolved on first use: importing this module loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import penstock.config

if TYPE_CHECKING:
    from penstock.config import (
        FLOAT_ENCODINGS,
        ConfigField,
        HuggingFaceConfig,
        KVCacheConfig,
        LoRAConfig,
        ModelConfig,
        PipelineConfig,
        PipelineOptions,
        Rule,
        SamplingConfig,
        SpeculativeConfig,
        StructuredOutputConfig,
        config_fields,
        parse_devices,
        upper_bounded_default,
    )

__all__ = [
    "FLOAT_ENCODINGS",
    "ConfigField",
    "HuggingFaceConfig",
    "KVCacheConfig",
    "LoRAConfig",
    "ModelConfig",
    "PipelineConfig",
    "PipelineOptions",
    "Rule",
    "SamplingConfig",
    "SpeculativeConfig",
    "StructuredOutputConfig",
    "config_fields",
    "parse_devices",
    "upper_bounded_default",
]


if not TYPE_CHECKING:  # a type checker must report names that do not exist

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(penstock.config, name)
