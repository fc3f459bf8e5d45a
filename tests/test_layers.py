"""Imports go down: who may import whom, as a table, and every import of the package held against it.

Rows are found by the longest prefix of a module's name; a name in a row stands for itself and what is
below it. Imports under ``TYPE_CHECKING`` count like any other, but may also use the names in ``typing``;
those inside functions may also use the names in ``lazily``. The standard library, a row's own modules and
``penstock.errors`` are free to all. The composition roots put everything together and are exempt.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMPOSITION_ROOTS = (
    "penstock.__main__",
    "penstock.assembly",
    "penstock.cli",
    "penstock.cli.environment",
    "penstock.llm.llm",
    "penstock.testing",
)
LAZY_FACES = ("penstock", "penstock.pipelines")  # these package __init__s, not what is below them

Where = Literal["module", "typing", "function"]


@dataclass(frozen=True)
class Row:
    """What a part of the package may import: anywhere, for typing only, inside functions only."""

    anywhere: str
    typing: str = ""
    lazily: str = ""

    def allows(self, target: str, where: Where) -> bool:
        more = {"module": "", "typing": self.typing, "function": self.lazily}[where]
        return any(_is_below(target, _full_name(name)) for name in f"{self.anywhere} {more}".split())


TABLE = {
    "demo": Row(""),
    "errors": Row(""),
    "dtype": Row("numpy", typing="torch", lazily="torch"),
    "limits": Row(""),
    "heartbeat": Row(""),
    "private_memory": Row(""),
    "host_memory": Row("", typing="numpy", lazily="numpy"),
    "driver": Row("numpy .limits .host_memory .private_memory", typing="torch", lazily="torch"),
    "kernels": Row("torch numpy .dtype .driver .heartbeat .host_memory"),
    "engine": Row("torch numpy .kernels .driver .dtype .limits"),
    "answers": Row(".beams .pipelines.core .pipelines.detokenizer"),
    "beams": Row("numpy .interrupts .pipelines.core .pipelines.kv_cache.interface"),
    "prompts": Row(".pipelines.config .pipelines.core"),
    "interrupts": Row(""),
    "loading": Row(""),
    "progress": Row("rich"),
    "nn": Row("torch .heartbeat .kernels .dtype"),
    "pipelines.core": Row("numpy msgspec", typing="torch"),
    "pipelines.config": Row(
        "msgspec .driver .dtype .pipelines.core .pipelines.weights.hub .pipelines.weights.json_files"
        " .pipelines.weights.safetensors .pipelines.weights.checkpoint .pipelines.weights.gguf_config",
        lazily=".kernels",
    ),
    "pipelines.weights": Row(
        "torch numpy safetensors .heartbeat .kernels .dtype .host_memory .private_memory",
        lazily="huggingface_hub",
    ),
    "pipelines.weights.hub": Row(
        ".pipelines.weights.gguf .pipelines.weights.json_files .pipelines.weights.safetensors",
        lazily="huggingface_hub",
    ),
    "pipelines.weights.checkpoint": Row(
        ".pipelines.weights.gguf .pipelines.weights.gguf_names .pipelines.weights.safetensors"
    ),
    "pipelines.weights.checksums": Row(".progress"),
    "pipelines.weights.gguf": Row(""),
    "pipelines.weights.gguf_blocks": Row("torch"),
    "pipelines.weights.gguf_config": Row(".pipelines.weights.gguf .pipelines.weights.gguf_names"),
    "pipelines.weights.gguf_names": Row(".dtype .pipelines.weights.gguf .pipelines.weights.safetensors"),
    "pipelines.weights.gguf_tensors": Row(
        "torch .pipelines.weights.gguf .pipelines.weights.gguf_blocks .pipelines.weights.gguf_names"
    ),
    "pipelines.weights.gguf_tokenizer": Row("tokenizers .pipelines.weights.gguf"),
    "pipelines.weights.names": Row(""),
    "pipelines.weights.json_files": Row(""),
    "pipelines.weights.mxfp4": Row("", typing="torch .pipelines.weights.safetensors", lazily="torch"),
    "pipelines.weights.safetensors": Row(".dtype .pipelines.weights.json_files .pipelines.weights.names"),
    "pipelines.kv_cache": Row("torch numpy .kernels .driver .dtype .pipelines.core"),
    "pipelines.kv_cache.interface": Row("numpy .pipelines.core"),
    "pipelines.kv_cache.block_pool": Row(""),
    "pipelines.packed_file": Row("", typing=".pipelines.config"),
    "pipelines.packed_weights": Row(
        "torch .__version__ .kernels .nn .pipelines.packed_file .pipelines.weights",
        typing=".pipelines.config",
    ),
    "pipelines.registry": Row(".dtype .pipelines.core", typing=".pipelines.config"),
    "pipelines.architectures": Row(
        "torch numpy .heartbeat .nn .kernels .driver .dtype .pipelines.config .pipelines.core"
        " .pipelines.decoder .pipelines.kv_cache .pipelines.model .pipelines.pipeline .pipelines.registry"
        " .pipelines.transformer .pipelines.weights",
        typing=".engine",
    ),
    "pipelines.memory": Row(
        "rich .kernels .driver .dtype .pipelines.core .pipelines.config .pipelines.kv_cache.spec"
        " .pipelines.weights",
        lazily=".nn",
    ),
    "pipelines.lora": Row("torch numpy .kernels .pipelines.core .pipelines.config .pipelines.weights"),
    "pipelines.lora.adapter_config": Row(".pipelines.weights.json_files"),
    "pipelines.lora.adapter": Row("torch .kernels .pipelines.lora.adapter_config .pipelines.weights"),
    "pipelines.lora.slots": Row("torch .pipelines.lora.adapter"),
    "pipelines.randomness": Row("numpy"),
    "pipelines.choices": Row("msgspec .pipelines.core .pipelines.randomness"),
    "pipelines.sampling": Row("torch numpy .kernels .pipelines.core .pipelines.randomness"),
    "pipelines.grammars": Row(".pipelines.core"),
    "pipelines.schema_keywords": Row(".pipelines.core .pipelines.grammars"),
    "pipelines.structured_output": Row(
        "torch numpy .pipelines.config .pipelines.core .pipelines.grammars .pipelines.tokenizer",
        typing="llguidance xgrammar",
        lazily="llguidance xgrammar",
    ),
    "pipelines.structured_output.vocabulary": Row("tokenizers"),
    "pipelines.speculative": Row("numpy .pipelines.core"),
    "pipelines.speculative.draft_model": Row(
        "torch numpy .dtype .pipelines.config .pipelines.core .pipelines.kv_cache .pipelines.memory"
        " .pipelines.model .pipelines.sampling .pipelines.structured_output",
        typing=".engine",
    ),
    "pipelines.model": Row(
        "torch numpy .nn .kernels .driver .dtype .private_memory .pipelines.config .pipelines.core"
        " .pipelines.kv_cache .pipelines.memory .pipelines.packed_file .pipelines.weights",
        typing=".engine .pipelines.lora",
    ),
    "pipelines.log_probabilities": Row("torch numpy .kernels .pipelines.core .pipelines.model"),
    "pipelines.calibration": Row(
        "torch numpy .kernels .pipelines.core .pipelines.kv_cache", typing=".pipelines.config"
    ),
    "pipelines.decoder": Row(
        "torch numpy .nn .kernels .driver .dtype .host_memory .pipelines.calibration .pipelines.config"
        " .pipelines.core .pipelines.kv_cache .pipelines.log_probabilities .pipelines.lora .pipelines.memory"
        " .pipelines.model .pipelines.packed_weights .pipelines.step_tensors .pipelines.weights .progress",
        typing=".engine",
    ),
    "pipelines.step_tensors": Row("torch .kernels .pipelines.model"),
    "pipelines.transformer": Row(".nn .pipelines.config .pipelines.decoder .pipelines.kv_cache"),
    "pipelines.step": Row(
        "torch numpy .engine .heartbeat .pipelines.core .pipelines.kv_cache .pipelines.model"
        " .pipelines.sampling .pipelines.speculative .pipelines.structured_output"
    ),
    "pipelines.pipeline": Row(
        "torch numpy .nn .kernels .engine .driver .dtype .pipelines.config .pipelines.core"
        " .pipelines.kv_cache .pipelines.log_probabilities .pipelines.lora .pipelines.memory"
        " .pipelines.model .pipelines.sampling .pipelines.speculative .pipelines.step"
        " .pipelines.structured_output .pipelines.weights"
    ),
    "pipelines.chat_template": Row("jinja2 .pipelines.core"),
    "pipelines.tokenizer_files": Row(
        "tokenizers .pipelines.chat_template .pipelines.weights.checkpoint"
        " .pipelines.weights.gguf_config .pipelines.weights.gguf_tokenizer",
        lazily="transformers",
    ),
    "pipelines.stop_sequences": Row(""),
    "pipelines.special_tokens": Row("tokenizers .pipelines.chat_template"),
    "pipelines.context_decoding": Row(".pipelines.core .pipelines.detokenizer"),
    "pipelines.tokenizer": Row(
        "numpy tokenizers .pipelines.core .pipelines.chat_template .pipelines.tokenizer_files"
        " .pipelines.stop_sequences .pipelines.context_decoding .pipelines.special_tokens"
    ),
    "pipelines.detokenizer": Row("numpy .pipelines.core .pipelines.tokenizer"),
    "scheduler": Row("numpy .private_memory .pipelines.core .pipelines.kv_cache.interface"),
    "scheduler.messages": Row("msgspec .pipelines.core .scheduler.isolation"),
    "scheduler.worker": Row(
        "msgspec zmq .heartbeat .loading .private_memory .pipelines.core .scheduler.messages"
        " .scheduler.scheduler"
    ),
    "benchmarking": Row("msgspec numpy rich", lazily="matplotlib"),
    "benchmarking.http_client": Row("msgspec"),
    "benchmarking.outcome": Row("msgspec .benchmarking.http_client"),
    "benchmarking.prompts": Row("msgspec .benchmarking.http_client"),
    "benchmarking.load": Row(".benchmarking.http_client .benchmarking.outcome"),
    "benchmarking.summary": Row("msgspec numpy .benchmarking.load"),
    "benchmarking.plot_title": Row("", typing="matplotlib"),
    "benchmarking.report": Row(
        "rich .benchmarking.load .benchmarking.plot_title .benchmarking.summary", lazily="matplotlib"
    ),
    "benchmarking.random_weights": Row(
        "torch .dtype .nn .pipelines.config .pipelines.registry .pipelines.weights", lazily="tokenizers"
    ),
    "benchmarking.works": Row(
        "numpy .benchmarking.random_weights .llm .pipelines.config .pipelines.core",
        typing=".answers .kernels",
    ),
    "benchmarking.works_report": Row(
        "rich .benchmarking.plot_title .benchmarking.works", lazily="matplotlib"
    ),
    "benchmarking.quality": Row(
        "numpy safetensors torch .llm .pipelines.core .pipelines.kv_cache .pipelines.weights"
    ),
    "benchmarking.cold_start": Row(".LLM .SamplingParams"),
    "serve.parsers": Row("msgspec .pipelines.core"),
    "serve.config": Row(".pipelines.config"),
    "serve.gate": Row(""),
    "serve.logs": Row(".serve.config"),
    "serve.request_record": Row("fastapi"),
    "serve.access_log": Row(".serve.logs .serve.request_record"),
    "serve.auth": Row(".serve.problems"),
    "serve.json_process": Row(""),
    "serve.json_decoder": Row(".serve.json_process"),
    "serve.sources": Row("starlette .serve.config .serve.problems .serve.request_record"),
    "serve.problems": Row("fastapi starlette pydantic msgspec .serve.request_record"),
    "serve.time_limits": Row(".serve.config .serve.problems .serve.request_record"),
    "serve.metrics": Row(
        "prometheus_client .__version__", typing=".serve.request_record .serve.worker_client"
    ),
    "serve.tracing": Row(
        ".__version__ .serve.request_record", typing="opentelemetry", lazily="opentelemetry"
    ),
    "serve.watchdog": Row("msgspec .serve.logs", typing=".serve.worker_client"),
    "serve.startup": Row(".serve.logs", lazily="rich"),
    "serve.http_server": Row("uvicorn fastapi .serve.config .serve.connection"),
    "serve.connection": Row("h11 uvicorn .serve.problems .serve.transport", lazily=".serve.fast_connection"),
    "serve.fast_connection": Row("uvicorn .serve.connection"),
    "serve.transport": Row(""),
    "serve.lifecycle": Row(
        ".loading .serve.config .serve.logs .serve.startup .serve.worker_client",
        typing=".pipelines.config .pipelines.tokenizer .scheduler.worker .serve",
        lazily="uvloop .serve",
    ),
    "serve.worker_client": Row(
        "zmq .pipelines.core .scheduler.messages .scheduler.worker .serve.liveness .serve.worker_link"
        " .serve.worker_results"
    ),
    "serve.liveness": Row(""),
    "serve.worker_link": Row("zmq .heartbeat .scheduler.messages .scheduler.worker"),
    "serve.worker_results": Row(".pipelines.core .scheduler.messages"),
    "serve.output_format": Row(
        ".pipelines.core .pipelines.schema_keywords .serve.parameters .serve.problems .serve.schemas"
        " .serve.services"
    ),
    "serve": Row(
        "fastapi starlette pydantic pydantic_core msgspec .__version__ .pipelines.core .pipelines.choices"
        " .pipelines.tokenizer .pipelines.detokenizer .pipelines.config .scheduler.worker"
        " .scheduler.messages",
        lazily=".pipelines.schema_keywords",
    ),
}


@dataclass(frozen=True)
class Import:
    """One import statement's target, and where it stands."""

    file: Path
    line: int
    source: str
    target: str
    where: Where

    def __str__(self) -> str:
        kind = {"module": "", "typing": " for typing", "function": " in a function"}[self.where]
        name = self.source.removeprefix("penstock.")
        return f"{name} imports {self.target.removeprefix('penstock.')}{kind} at {self.file}:{self.line}"


def test_imports_go_down() -> None:
    files = sorted((ROOT / "penstock").rglob("*.py"))
    faults = [fault for file in files for fault in faults_of(file)]
    assert not faults, "\n".join(["", *faults])


@pytest.mark.parametrize(
    ("name", "code", "fault"),
    [
        ("scheduler/scheduler.py", "import penstock.serve", "scheduler.scheduler imports serve at"),
        ("scheduler/scheduler.py", "import torch", "scheduler.scheduler imports torch at"),
        ("scheduler/x.py", "def f():\n import torch", "imports torch in a function at"),
        ("scheduler/x.py", "from penstock.kv_cache import manager", "imports pipelines.kv_cache"),
        ("scheduler/x.py", "from ..pipelines import registry", "imports pipelines.registry at"),
        ("nn/linear.py", "from penstock import pipelines", "nn.linear imports pipelines at"),
        ("dtype.py", "import torch", "dtype imports torch at"),
        ("errors.py", "from penstock.dtype import DType", "errors imports dtype.DType at"),
        ("pipelines/core/x.py", "def f():\n import torch", "core.x imports torch in a function at"),
        ("pipelines/core/x.py", "import transformers", "core.x imports transformers at"),
        ("pipelines/core/__init__.py", "from . import x\nimport rich", "pipelines.core imports rich at"),
        (
            "pipelines/text_generation.py",
            "import penstock.pipelines.embeddings",
            "imports pipelines.embeddings at",
        ),
        ("text/tokenizer.py", "if 1:\n import torch", "pipelines.tokenizer imports torch at"),
        ("pipelines/x.py", "import numpy", "pipelines.x has no row in the table"),
        ("x.py", "import numpy", "x has no row in the table"),
        (
            "kernels/x.py",
            "if TYPE_CHECKING:\n from penstock.nn import Linear",
            "kernels.x imports nn.Linear for typing at",
        ),
    ],
)
def test_a_wrong_import_is_found(name: str, code: str, fault: str, tmp_path: Path) -> None:
    assert fault in "\n".join(_faults(name, code, tmp_path))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("scheduler/scheduler.py", "from penstock.kv_cache.interface import KVCache\nimport heapq"),
        ("scheduler/scheduler.py", "from penstock.errors import InputError\nfrom . import budget"),
        ("pipelines/core/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n import torch"),
        ("text/tokenizer_files.py", "def f():\n from transformers import AutoTokenizer"),
        ("dtype.py", "class A:\n def f(self):\n  import torch"),
        ("cli.py", "import penstock.scheduler, torch"),
        ("pipelines/__init__.py", "from penstock.pipelines.text_generation import PipelineModel"),
    ],
)
def test_a_right_import_is_let_through(name: str, code: str, tmp_path: Path) -> None:
    assert _faults(name, code, tmp_path) == []


def faults_of(file: Path, root: Path = ROOT) -> Iterator[str]:
    """What the table has against a module."""
    source = _module_name(file.relative_to(root))
    if source in LAZY_FACES or any(_is_below(source, exempt) for exempt in COMPOSITION_ROOTS):
        return
    row = _row_name(source)
    if row is None:
        yield f"{source.removeprefix('penstock.')} has no row in the table of tests/test_layers.py"
        return
    for found in imports_of(file, root):
        free = found.target.split(".")[0] in sys.stdlib_module_names or (
            _is_below(found.target, f"penstock.{row}") or _is_below(found.target, "penstock.errors")
        )
        if not free and not TABLE[row].allows(found.target, found.where):
            yield str(found)


def imports_of(file: Path, root: Path = ROOT) -> Iterator[Import]:
    """All imports of a module, those of its functions and its ``TYPE_CHECKING`` blocks included."""
    source = _module_name(file.relative_to(root))
    package = file.relative_to(root).parts[:-1]

    def walk(node: ast.AST, where: Where) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for target in _targets(child, package):
                yield Import(file.relative_to(root), child.lineno, source, target, where)  # type: ignore[attr-defined]
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, "typing")
            else:
                yield from walk(child, "function" if inside else where)

    yield from walk(_parsed(file), "module")


def _targets(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else ()
        module = ".".join([*above, *([node.module] if node.module else [])])
        if _is_below(module, "penstock"):  # the name may be a module: penstock.pipelines is not its parts
            return [f"{module}.{alias.name}" for alias in node.names]
        return [module]
    return []


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), filename=str(file))


def _module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _row_name(source: str) -> str | None:
    name = source.removeprefix("penstock.")
    while name not in TABLE:
        if "." not in name:
            return None
        name = name.rpartition(".")[0]
    return name


def _full_name(name: str) -> str:
    return f"penstock{name}" if name.startswith(".") else name


def _is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _faults(name: str, code: str, root: Path) -> list[str]:
    file = root / "penstock" / name
    file.parent.mkdir(parents=True)
    file.write_text(code)
    return list(faults_of(file, root))
