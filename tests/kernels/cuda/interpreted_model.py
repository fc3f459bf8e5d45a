"""A model generates tokens with the Triton kernels in Triton's interpreter.

`test_interpreter.py` runs this file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import make_tiny_config, write_checkpoint
from support.pipeline_steps import generate_tokens, make_context, open_pipeline, random_tokens

from penstock.kernels import BACKENDS, DefaultSizes
from penstock.kernels.cuda import BACKEND
from penstock.kernels.cuda.ops import CudaOps


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, make_tiny_config("llama"))


@pytest.fixture
def _register_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a back end that runs the Triton kernels on the CPU, in the interpreter."""
    monkeypatch.setattr(BACKENDS, "_registered", {})
    sizes = {"cpu": DefaultSizes(max_batch_size=4, step_tokens=64)}
    BACKENDS.register(replace(BACKEND, name="interpreted", default_sizes=sizes, load=CudaOps))


@pytest.mark.usefixtures("_register_interpreted")
def test_a_model_generates_the_tokens_of_the_reference(checkpoint: Path) -> None:
    prompts = [random_tokens(count, 130, seed=count) for count in (2, 5)]
    generated_tokens = []
    for kernels in ("reference", "interpreted"):
        pipeline = open_pipeline(checkpoint, kernels=kernels, deterministic=True)
        assert pipeline.session.ops.name == ("cuda" if kernels == "interpreted" else "reference")
        generated_tokens.append(generate_tokens(pipeline, [make_context(prompt, 2) for prompt in prompts]))
        if kernels == "interpreted":
            assert pipeline.session.ops.is_deterministic  # type: ignore[attr-defined]
    assert generated_tokens[0] == generated_tokens[1]
