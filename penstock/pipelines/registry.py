"""Re-exports `penstock.architectures.registry`."""

from __future__ import annotations

from penstock.architectures.registry import PIPELINE_REGISTRY, PipelineRegistry, SupportedArchitecture

__all__ = ["PIPELINE_REGISTRY", "PipelineRegistry", "SupportedArchitecture"]
