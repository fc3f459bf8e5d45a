"""Tests of the CUDA back end pass in Triton's interpreter, which runs in separate processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.cuda import BACKEND

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run_interpreted(*arguments: str, timeout: float) -> str:
    """Run pytest in a process with the interpreter, and return its output. Fail if a test fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    completed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert completed.returncode == 0, f"{completed.stdout[-6000:]}\n{completed.stderr[-2000:]}"
    return completed.stdout


@pytest.mark.timeout(600)
def test_kernels_pass_on_small_shapes() -> None:
    files = [
        f"tests/kernels/cuda/interpreted_{name}.py"
        for name in ("checks", "attention", "lookups", "model", "recurrent", "sampling")
    ]
    assert " passed" in run_interpreted(*files, timeout=590)


@pytest.mark.random
def test_kernels_pass_on_random_shapes() -> None:
    files = [f"tests/kernels/cuda/interpreted_{name}.py" for name in ("attention", "draws")]
    assert " passed" in run_interpreted(*files, "--random", "-m", "random", timeout=3500)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_kernels_pass_on_a_matrix_of_shapes() -> None:
    assert " passed" in run_interpreted(
        "tests/kernels/cuda/interpreted_matrix.py", "--slow", "--timeout=1800", timeout=7000
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_models_run_on_interpreted_kernels() -> None:
    """Run two of Llama's parity tests, of a mixed batch and of one chunk size, on the interpreted kernels."""
    expression = "llama and best and (mixed_batch or chunks0)"
    assert " passed" in run_interpreted(
        "tests/architectures/test_parity.py", "--timeout=1800", "-m", "gpu", "-k", expression, timeout=7000
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "test_file",
    ["conformance", "encoder_attention", "experts", "determinism", "recurrent", "sampling"],
)
def test_back_end_tests_pass_on_interpreted_kernels(test_file: str) -> None:
    expression = "cuda and not 32003 and not snake and not polar"
    run_interpreted(f"tests/kernels/test_{test_file}.py", "--timeout=1800", "-k", expression, timeout=7000)


def test_the_back_end_needs_a_gpu_or_the_interpreter() -> None:
    import torch

    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the back end runs on this machine")
    assert BACKEND.load() is None
    assert list(BACKEND.variants()) == []
