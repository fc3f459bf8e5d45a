"""Imports: light modules load no torch and no other heavy package, and ``penstock`` has its public names."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY_PACKAGES = ("torch", "transformers", "xgrammar", "llguidance")


LIGHT_MODULES = (
    "penstock",
    "penstock.__main__",
    "penstock.cli",
    "penstock.driver",
    "penstock.dtype",
    "penstock.pipelines",
    "penstock.config",
    "penstock.pipelines.core",
    "penstock.text.detokenizer",
    "penstock.kv_cache.interface",
    "penstock.architectures.registry",
    "penstock.text.tokenizer",
    "penstock.scheduler",
    "penstock.worker.process",
    "penstock.serve.app",
    "penstock.serve.http.lifecycle",
    "penstock.cli.serve",
)


def test_light_modules_load_no_heavy_package() -> None:
    """A process imports the modules in turn and prints the first module that loads a heavy package."""
    code = (
        "import importlib, sys\n"
        f"for name in {LIGHT_MODULES}:\n"
        "    importlib.import_module(name)\n"
        f"    if loaded := sorted({set(HEAVY_PACKAGES)} & set(sys.modules)): sys.exit(print(name, loaded))"
    )
    assert _run_in_new_process(code) == ""


def test_listing_architectures_loads_no_heavy_package() -> None:
    code = (
        "import sys; from penstock.architectures.registry import PIPELINE_REGISTRY;"
        "assert PIPELINE_REGISTRY.architectures;"
        f"print(*sorted(set({HEAVY_PACKAGES!r}) & set(sys.modules)))"
    )
    assert _run_in_new_process(code) == ""


def test_llm_is_listed_and_sampling_params_is_the_original_class() -> None:
    code = (
        "import penstock; from penstock import SamplingParams; assert 'LLM' in dir(penstock);"
        "from penstock.pipelines.core import SamplingParams as original; print(SamplingParams is original)"
    )
    assert _run_in_new_process(code) == "True"


def test_an_unknown_name_raises_attribute_error() -> None:
    import penstock

    with pytest.raises(AttributeError, match="'penstock' has no attribute 'LLLM'"):
        penstock.LLLM  # noqa: B018


def _run_in_new_process(code: str) -> str:
    """Return the output of ``code`` in a new process."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_server_lifecycle_module_loads_no_slow_package() -> None:
    """The worker process is started before the server imports these slow packages."""
    packages = ("fastapi", "uvicorn", "prometheus_client", "tokenizers", "rich")
    code = f"import sys, penstock.serve.http.lifecycle; print(*sorted(set({packages!r}) & set(sys.modules)))"
    assert _run_in_new_process(code) == ""
