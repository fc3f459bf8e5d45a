"""Imports of a new process: the server, the command line and the client modules do not load torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "xgrammar", "llguidance")


LIGHT = (
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


def test_importing_these_modules_loads_nothing_heavy() -> None:
    """One process imports all of them in turn; the first module that loads something heavy is printed."""
    code = (
        "import importlib, sys\n"
        f"for name in {LIGHT}:\n"
        "    importlib.import_module(name)\n"
        f"    if found := sorted({set(HEAVY)} & set(sys.modules)): sys.exit(print(name, found))"
    )
    assert _fresh(code) == ""


def test_looking_for_architectures_loads_nothing_heavy() -> None:
    code = (
        "import sys; from penstock.architectures.registry import PIPELINE_REGISTRY;"
        "assert PIPELINE_REGISTRY.architectures;"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    assert _fresh(code) == ""


def test_public_names_arrive_on_first_use() -> None:
    code = (
        "import penstock; from penstock import SamplingParams; assert 'LLM' in dir(penstock);"
        "from penstock.pipelines.core import SamplingParams as home; print(SamplingParams is home)"
    )
    assert _fresh(code) == "True"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import penstock

    with pytest.raises(AttributeError, match="'penstock' has no attribute 'LLLM'"):
        penstock.LLLM  # noqa: B018


def _fresh(code: str) -> str:
    """Return the output of ``code`` in a new process."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_lifecycle_leaves_the_framework_for_later() -> None:
    """The worker's process is started before the slow imports of the server."""
    late = ("fastapi", "uvicorn", "prometheus_client", "tokenizers", "rich")
    code = f"import sys, penstock.serve.http.lifecycle; print(*sorted(set({late!r}) & set(sys.modules)))"
    assert _fresh(code) == ""
