"""Import rules: allowed imports, no import cycles, folders without torch, and fixed paths of public modules.

A folder may import the folders and packages in its row of TABLE, its own modules, the standard library,
``penstock.errors``, ``penstock.dtype``, ``penstock.plain_numbers`` and ``penstock.__version__``. The table
also applies to imports inside functions and under ``TYPE_CHECKING``, where the packages in ``Row.lazy`` are
allowed, too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parents[1]

COMPOSITION_ROOTS = ("__main__", "assembly", "bench", "cli", "engines", "llm", "ranks", "ray", "testing")
"""These folders and modules may import anything."""
LAZY_PACKAGES = ("", "codecs", "kernels", "pipelines")
"""Packages whose ``__init__`` imports public names on first use. The ``__init__`` may import any module."""

ImportScope = Literal["module", "typing", "function"]


@dataclass(frozen=True)
class Row:
    """Packages and folders that one folder may import.

    Args:
        penstock: folders of the package, separated by spaces.
        packages: third-party packages, separated by spaces.
        lazy: third-party packages that may only be imported inside functions or for typing.
    """

    penstock: str = ""
    packages: str = ""
    lazy: str = ""


_BASE_FOLDERS = "pipelines.core kernels driver host"
_MIDDLE = f"{_BASE_FOLDERS} config text media grammar weights kv_cache"
_MODEL_TOOL_IMPORTS = "kernels distributed nn weights kv_cache config pipelines.core driver host"
_MODEL_IMPORTS = f"{_MIDDLE} nn codecs distributed memory lora calibration log_probabilities engine"

TABLE: Mapping[str, Row] = {
    "errors": Row(),
    "plain_numbers": Row(),
    "dtype": Row("", "numpy", "torch"),
    "demo": Row(),
    "host": Row("", "rich", "numpy torch"),
    "driver": Row("host", "numpy", "torch"),
    "pipelines.core": Row("", "numpy msgspec", "torch xgrammar"),
    "distributed": Row("kernels driver host", "torch numpy"),
    "kernels": Row("host driver", "torch numpy triton"),
    "engine": Row("kernels distributed driver host", "torch numpy"),
    "config": Row(f"{_BASE_FOLDERS} text weights", "msgspec"),
    "text": Row(f"{_BASE_FOLDERS} weights", "numpy tokenizers jinja2", "transformers"),
    "media": Row(
        f"{_BASE_FOLDERS} config text weights", "numpy msgspec", "PIL soundfile transformers tokenizers"
    ),
    "grammar": Row(f"{_BASE_FOLDERS} config text", "torch numpy tokenizers", "xgrammar llguidance"),
    "weights": Row(_BASE_FOLDERS, "torch numpy safetensors tokenizers", "huggingface_hub gguf"),
    "kv_cache": Row(_BASE_FOLDERS, "torch numpy"),
    "nn": Row("kernels distributed driver host", "torch"),
    "codecs": Row("kernels nn weights config engine distributed driver host", "torch numpy"),
    "memory": Row(_MODEL_TOOL_IMPORTS, "rich"),
    "lora": Row(f"{_MODEL_TOOL_IMPORTS} memory", "torch numpy"),
    "calibration": Row(_MODEL_TOOL_IMPORTS, "torch numpy"),
    "log_probabilities": Row(_MODEL_TOOL_IMPORTS, "torch"),
    "architectures": Row(_MODEL_IMPORTS, "torch numpy", "transformers"),
    "pipelines": Row(f"{_MODEL_IMPORTS} architectures", "torch numpy"),
    "scheduler": Row("pipelines.core kv_cache host", "numpy"),
    "worker": Row("scheduler kv_cache pipelines.core host", "msgspec numpy zmq"),
    "serve": Row(
        "worker pipelines.core text media grammar config host",
        "fastapi starlette pydantic pydantic_core msgspec numpy uvicorn h11 prometheus_client "
        "python_multipart",
        "httpx2 mcp opentelemetry rich uvloop",
    ),
}

NO_TORCH = ("scheduler", "worker", "serve", "pipelines.core", "config", "host", "errors", "dtype")
"""Folders and modules that can be imported without loading torch."""
NEEDS_EXTRA = ("penstock.serve.http.fast_connection",)  # imported only where httptools is installed

PUBLIC_MODULES = (
    "penstock",
    "penstock.driver",
    "penstock.dtype",
    "penstock.engine",
    "penstock.pipelines",
    "penstock.pipelines.config",
    "penstock.pipelines.core",
    "penstock.pipelines.decoder",
    "penstock.pipelines.kv_cache",
    "penstock.pipelines.pipeline",
    "penstock.pipelines.registry",
    "penstock.pipelines.response",
    "penstock.pipelines.tokenizer",
    "penstock.pipelines.transformer",
    "penstock.pipelines.weights",
    "penstock.testing",
)


@dataclass(frozen=True)
class Import:
    """One imported name and its location."""

    file: Path
    line: int
    source: str
    target: str
    scope: ImportScope

    def __str__(self) -> str:
        scope = {"module": "", "typing": " for typing", "function": " in a function"}[self.scope]
        name = self.source.removeprefix("penstock.")
        return f"{name} imports {self.target.removeprefix('penstock.')}{scope} at {self.file}:{self.line}"


def test_imports_follow_the_table() -> None:
    files = sorted((ROOT / "penstock").rglob("*.py"))
    violations = [violation for file in files for violation in find_violations(file)]
    assert not violations, "\n".join(["", *violations])


def test_each_folder_of_the_table_exists() -> None:
    for folder in TABLE:
        path = ROOT / "penstock" / Path(*folder.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), folder


@pytest.mark.parametrize("level", ["folder", "module"])
def test_no_import_cycle(level: str) -> None:
    """Imports in functions and for typing count. Imports by or of an ``__init__`` of LAZY_PACKAGES do not."""
    files = sorted((ROOT / "penstock").rglob("*.py"))
    names = {_module_name(file.relative_to(ROOT)) for file in files}
    graph: dict[str, set[str]] = {}
    for file in files:
        for imported in find_imports(file):
            source, target = imported.source, _find_known_module(imported.target, names)
            if _is_lazy_package(source) or _is_lazy_package(target):
                continue
            if level == "folder":
                source, target = _find_row(source) or source, _find_row(target) or target
            if source != target:
                graph.setdefault(source, set()).add(target)
    assert find_cycle(graph) is None


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, None),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, None),
    ],
)
def test_find_cycle_returns_a_cycle_or_none(graph: dict[str, set[str]], expected: list[str] | None) -> None:
    assert find_cycle(graph) == expected


@pytest.mark.parametrize("folder", NO_TORCH)
def test_importing_the_folder_loads_no_torch(folder: str) -> None:
    path = ROOT / "penstock" / Path(*folder.split("."))
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    modules = [name for file in files if (name := _module_name(file.relative_to(ROOT))) not in NEEDS_EXTRA]
    code = f"import sys\nfor name in {modules!r}: __import__(name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_public_modules_keep_their_paths(name: str) -> None:
    module = import_module(name)
    for public_name in module.__all__ if hasattr(module, "__all__") else ():
        assert getattr(module, public_name) is not None


@pytest.mark.parametrize(
    ("name", "code", "violation"),
    [
        ("scheduler/scheduler.py", "import penstock.serve", "scheduler.scheduler imports serve at"),
        ("scheduler/scheduler.py", "import torch", "scheduler.scheduler imports torch at"),
        ("scheduler/x.py", "def f():\n import torch", "imports torch in a function at"),
        ("scheduler/x.py", "from ..architectures import registry", "imports architectures.registry at"),
        ("nn/linear.py", "from penstock import pipelines", "nn.linear imports pipelines at"),
        ("dtype.py", "import torch", "dtype imports torch at"),
        ("errors.py", "from penstock.driver import Device", "errors imports driver.Device at"),
        (
            "pipelines/core/x.py",
            "def f():\n import transformers",
            "core.x imports transformers in a function",
        ),
        ("pipelines/core/__init__.py", "import rich", "pipelines.core imports rich at"),
        ("pipelines/text_generation.py", "import penstock.scheduler", "imports scheduler at"),
        ("text/tokenizer.py", "if 1:\n import torch", "text.tokenizer imports torch at"),
        (
            "weights/x.py",
            "from penstock.config import ModelConfig",
            "weights.x imports config.ModelConfig at",
        ),
        ("unknown.py", "import numpy", "unknown has no row in the table"),
        (
            "kernels/x.py",
            "if TYPE_CHECKING:\n from penstock.nn import Linear",
            "kernels.x imports nn.Linear for typing at",
        ),
    ],
)
def test_a_violation_is_reported(name: str, code: str, violation: str, tmp_path: Path) -> None:
    assert violation in "\n".join(_check_code(name, code, tmp_path))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("scheduler/scheduler.py", "from penstock.kv_cache.interface import KVCache\nimport heapq"),
        ("scheduler/scheduler.py", "from penstock.errors import InputError\nfrom . import budget"),
        ("pipelines/core/x.py", "if TYPE_CHECKING:\n import xgrammar"),
        ("text/tokenizer_files.py", "def f():\n from transformers import AutoTokenizer"),
        ("dtype.py", "class A:\n def f(self):\n  import torch"),
        ("cli/x.py", "import penstock.scheduler, torch"),
        ("pipelines/__init__.py", "from penstock.architectures.model import PipelineModel"),
    ],
)
def test_a_valid_import_is_not_reported(name: str, code: str, tmp_path: Path) -> None:
    assert _check_code(name, code, tmp_path) == []


def find_violations(file: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield a message for each import that the table does not allow, or for a module without a row."""
    source = _module_name(file.relative_to(root))
    folder = _find_row(source)
    if folder in COMPOSITION_ROOTS or _is_lazy_package(source):
        return
    if folder is None:
        yield f"{source.removeprefix('penstock.')} has no row in the table of tests/test_layers.py"
        return
    row = TABLE[folder]
    for imported in find_imports(file, root):
        if not _is_allowed(imported, folder, row):
            yield str(imported)


def _is_allowed(imported: Import, folder: str, row: Row) -> bool:
    package = imported.target.split(".")[0]
    if package != "penstock":
        packages = row.packages.split() + (row.lazy.split() if imported.scope != "module" else [])
        return package in sys.stdlib_module_names or package in packages
    target = _find_row(imported.target)
    if imported.target == "penstock.__version__" or target in ("errors", "dtype", "plain_numbers"):
        return True
    return target == folder or target in row.penstock.split()


def find_imports(file: Path, root: Path = ROOT) -> Iterator[Import]:
    """Yield all imports of a module, including those in functions and under ``TYPE_CHECKING``."""
    source = _module_name(file.relative_to(root))
    package = file.relative_to(root).parts[:-1]

    def walk(node: ast.AST, scope: ImportScope) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for target in _imported_names(child, package):
                yield Import(file.relative_to(root), child.lineno, source, target, scope)  # type: ignore[attr-defined]
            is_inside_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, "typing")
            else:
                yield from walk(child, "function" if is_inside_function else scope)

    yield from walk(_parse(file), "module")


def find_cycle(graph: Mapping[str, Iterable[str]]) -> list[str] | None:
    """Return the nodes of a cycle, with the first node repeated at the end, or None if there is no cycle."""
    visited: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in visited:
            return None
        for target in sorted(graph.get(node, ())):
            cycle = visit(target, [*path, node])
            if cycle is not None:
                return cycle
        visited.add(node)
        return None

    for node in sorted(graph):
        cycle = visit(node, [])
        if cycle is not None:
            return cycle
    return None


def _imported_names(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = package[: len(package) - node.level + 1] if node.level else ()
        module = ".".join([*parents, *([node.module] if node.module else [])])
        if module.split(".")[0] == "penstock":  # the imported name may be a module
            return [f"{module}.{alias.name}" for alias in node.names]
        return [module]
    return []


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), filename=str(file))


def _module_name(file: Path) -> str:
    module_parts = file.with_suffix("").parts
    return ".".join(module_parts[:-1] if module_parts[-1] == "__init__" else module_parts)


def _find_known_module(target: str, names: set[str]) -> str:
    while target not in names and "." in target:
        target = target.rpartition(".")[0]
    return target


def _is_lazy_package(module: str) -> bool:
    return module == "penstock" or module.removeprefix("penstock.") in LAZY_PACKAGES


def _find_row(module: str) -> str | None:
    """Return the table row or composition root that contains a module, or None."""
    name = module.removeprefix("penstock.")
    while name:
        if name in TABLE or name in COMPOSITION_ROOTS:
            return name
        name = name.rpartition(".")[0]
    return None


def _check_code(name: str, code: str, root: Path) -> list[str]:
    file = root / "penstock" / name
    file.parent.mkdir(parents=True)
    file.write_text(code)
    return list(find_violations(file, root))
