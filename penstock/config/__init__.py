"""The configuration of a pipeline: frozen dataclasses, built from flags, environment variables and a file.

Importing this package does not import torch.
"""

from __future__ import annotations

from penstock.config.huggingface import HuggingFaceConfig
from penstock.config.lora import LoRAConfig
from penstock.config.model import FLOAT_ENCODINGS, ModelConfig, parse_devices
from penstock.config.options import PipelineOptions
from penstock.config.pipeline import (
    KVCacheConfig,
    PipelineConfig,
    SamplingConfig,
    config_fields,
)
from penstock.config.settings import ConfigField, Rule
from penstock.config.speculative import SpeculativeConfig
from penstock.config.structured_output import StructuredOutputConfig
from penstock.config.vision import VisionConfig
from penstock.errors import ConfigError

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
    "VisionConfig",
    "config_fields",
    "parse_devices",
    "upper_bounded_default",
]


def upper_bounded_default(upper_bound: int, default: int | None) -> int:
    """Return ``default``, the configured maximum length of a model; ``upper_bound`` if ``default`` is None.

    Raises:
        ConfigError: ``default`` exceeds ``upper_bound``.
    """
    if default is None:
        return upper_bound
    if default > upper_bound:
        raise ConfigError(
            "max_length", f"the value given ({default}) exceeds the upper bound of the model ({upper_bound})"
        )
    return default
