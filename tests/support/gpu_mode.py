"""Tests on a GPU. With ``-m gpu``, the tests marked ``models`` open their pipelines on the GPU.

With ``TRITON_INTERPRET=1`` and without a GPU, Triton's interpreter runs the kernels instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest


def selects_gpu(config: pytest.Config) -> bool:
    """Return whether the option ``-m`` selects only GPU tests."""
    return str(config.getoption("markexpr", "")).split(" and ")[0] == "gpu"


def has_gpu() -> bool:
    """Return whether torch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels of the back end `cuda`."""
    from penstock.kernels.cuda.availability import is_interpreted

    return is_interpreted()


def mark_gpu_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``-m gpu``, mark the tests marked ``models`` as ``gpu``.

    Skip tests that need a GPU if there is none.
    """
    skip = pytest.mark.skip(reason="gpu: torch finds no NVIDIA GPU here")
    is_gpu_run = selects_gpu(config)
    for item in items:
        if item.get_closest_marker("gpu"):
            if not has_gpu():
                item.add_marker(skip)
        elif is_gpu_run and item.get_closest_marker("models"):
            item.add_marker("gpu")
            if not has_gpu() and not is_interpreted():
                item.add_marker(skip)


def open_pipelines_on_gpu() -> None:
    """Change `PipelineConfig.from_flat`, so that pipelines use the GPU if devices and kernels are not set.

    Without a GPU, pipelines use Triton's interpreter if ``TRITON_INTERPRET=1``. Otherwise `from_flat` remains
    unchanged.
    """
    from penstock.config import PipelineConfig

    from_flat = PipelineConfig.from_flat.__func__  # type: ignore[attr-defined]
    if has_gpu():
        gpu_values = {"devices": "gpu"}
    elif is_interpreted():
        register_interpreted()
        gpu_values = {"kernels": "interpreted"}
    else:
        return

    def from_flat_on_gpu(cls: Any, values: Mapping[str, object], *args: Any, **kwargs: Any) -> PipelineConfig:
        is_explicit = values.get("devices") or values.get("kernels")
        config: PipelineConfig = from_flat(
            cls, values if is_explicit else {**values, **gpu_values}, *args, **kwargs
        )
        return config

    PipelineConfig.from_flat = classmethod(from_flat_on_gpu)  # type: ignore[assignment, method-assign]


def register_interpreted() -> None:
    """Register the back end ``interpreted``, which runs the Triton kernels in Triton's interpreter."""
    from penstock.kernels import BACKENDS, DefaultSizes
    from penstock.kernels.cuda import BACKEND
    from penstock.kernels.cuda.ops import CudaOps

    sizes = {"cpu": DefaultSizes(max_batch_size=8, step_tokens=512)}
    BACKENDS.register(
        replace(BACKEND, name="interpreted", priority=-1, default_sizes=sizes, load=CudaOps, variants=list)
    )
