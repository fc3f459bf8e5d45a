"""Positions with several axes: steps are prepared without reading from the device, and run eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.images import forward_logits
from support.pipeline_steps import open_pipeline
from support.vision import PROMPTS, save_vision_model

from penstock.architectures.registry import PIPELINE_REGISTRY
from penstock.kernels import StepInputs
from penstock.kernels.reference import ReferenceOps
from penstock.nn import Rotary, RotaryConfig
from penstock.pipelines import TextGenerationPipeline


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> TextGenerationPipeline:
    folder: Path = tmp_path_factory.mktemp("qwen2_vl")
    save_vision_model(find_architecture(), folder)
    return open_pipeline(folder)


def find_architecture() -> Any:
    candidates = PIPELINE_REGISTRY.architectures
    (qwen2_vl,) = (candidate for candidate in candidates if candidate.name == "qwen2_vl")
    return qwen2_vl


def test_preparing_a_step_reads_no_tensor_of_the_device(
    pipeline: TextGenerationPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a tensor on the device ``meta`` is an error. On a GPU, reading waits for the previous step."""
    model: Any = pipeline.model

    def make_meta_tensor(values: np.ndarray, dtype: type) -> torch.Tensor:
        return torch.from_numpy(values.astype(dtype)).to("meta")

    monkeypatch.setattr(model, "_to_device", make_meta_tensor)
    context = PROMPTS["qwen2_vl"](find_architecture().tiny_config()).context()
    inputs = model.prepare_initial_token_inputs([[context]], None, 1, drafts=[[7, 8]])
    assert inputs.positions.shape == (3, context.active_length + 2)


def test_a_step_with_several_axes_runs_eagerly(pipeline: TextGenerationPipeline) -> None:
    """Compiled steps pad two-dimensional inputs, so they cannot read positions ``[3, T]``."""
    for _ in range(3):
        context = PROMPTS["qwen2_vl"](find_architecture().tiny_config()).context()
        forward_logits(pipeline, [context])
        pipeline.release(context)
        assert pipeline.session.graph_status == "eager: positions of several axes"


def test_rotary_rows_of_several_axes_need_no_copy_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from memory that is not pinned waits for the device, and a CUDA graph cannot contain it."""
    config = RotaryConfig(8, 1e4, "default", 64, 64, axes=(0, 1, 2, 0))
    rotary = Rotary(config, 64, torch.device("cpu"))
    positions = torch.tensor([[1, 2], [3, 4], [5, 6]])
    expected = rotary.cos[[2, 4, 6, 2], range(4)]
    step = StepInputs(ReferenceOps(), positions, torch.tensor([0, 2]))
    for name in ("tensor", "as_tensor", "from_numpy"):
        monkeypatch.delattr(torch, name)
    cos, _ = rotary.rows(step)
    assert torch.equal(cos[1], expected)
