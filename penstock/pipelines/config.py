"""Re-exports names of `penstock.config`, each imported on first use. Neither module loads torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names

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


if not TYPE_CHECKING:  # with __getattr__, type checkers would accept missing names
    __getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "penstock.config"))
