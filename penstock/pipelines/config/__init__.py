"""The configuration of a pipeline: frozen objects, filled from flags, environment and file by one function.

Nothing here loads torch.
"""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.pipelines.config.huggingface import HuggingFaceConfig
from penstock.pipelines.config.lora import LoRAConfig
from penstock.pipelines.config.model import FLOAT_ENCODINGS, ModelConfig, parse_devices
from penstock.pipelines.config.options import PipelineOptions
from penstock.pipelines.config.pipeline import (
    KVCacheConfig,
    PipelineConfig,
    SamplingConfig,
    config_fields,
)
from penstock.pipelines.config.settings import ConfigField, Rule
from penstock.pipelines.config.speculative import SpeculativeConfig
from penstock.pipelines.config.structured_output import StructuredOutputConfig

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


def upper_bounded_default(upper_bound: int, default: int | None) -> int:
    """``default``, or ``upper_bound`` where there is none: how a model settles its maximum length.

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
