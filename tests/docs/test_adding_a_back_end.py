"""docs/adding-a-back-end.md: the page's check passes with the page's files and fails with faulty files."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.documents import ROOT

from penstock.kernels import BACKENDS, OPERATIONS, Backend, BackendRegistry
from penstock.kernels.operations import CFunction, operation
from penstock.kernels.recording import record
from penstock.kernels.reference import ReferenceOps

PAGE = (ROOT / "docs" / "adding-a-back-end.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE))


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(BACKENDS, "_registered", {})
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("numpy_cpu")]:
        del sys.modules[name]


def run_check(page_folder: Path) -> None:
    exec(compile((page_folder / "check.py").read_text(), "check.py", "exec"), {"__name__": "__main__"})


def test_the_page_contains_all_files() -> None:
    assert sorted(FILES) == ["check.py", "numpy_cpu/__init__.py", "numpy_cpu/columns.py", "numpy_cpu/ops.py"]
    assert PAGE.count("```python") == len(FILES)


def test_the_check_passes(page_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_check(page_folder)
    assert capsys.readouterr().out == "4 ['gated_activation', 'take_rows']\n"


@pytest.mark.parametrize(
    ("name", "correct_text", "faulty_text"),
    [
        ("ops.py", "* up", "+ up"),
        ("ops.py", "-gate", "gate"),
        ("ops.py", "[rows.numpy()]", "[: len(rows)]"),
        ("columns.py", "padded @ columns", "padded @ -columns"),
        ("columns.py", '"columns"].T', '"columns"].T.flip(0)'),
    ],
)
def test_the_check_detects_an_error(
    page_folder: Path, name: str, correct_text: str, faulty_text: str
) -> None:
    file = page_folder / "numpy_cpu" / name
    assert correct_text in file.read_text()
    file.write_text(file.read_text().replace(correct_text, faulty_text))
    with pytest.raises(AssertionError):
        run_check(page_folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_of_the_page_agree_with_the_reference(page_folder: Path, dtype: torch.dtype) -> None:
    reference = ReferenceOps()
    for ops in import_module("numpy_cpu").BACKEND.variants():
        x = (100 * torch.randn(33, 64)).to(dtype)
        for activation in ("silu", "gelu"):
            expected = reference.gated_activation(x, activation)
            torch.testing.assert_close(ops.gated_activation(x, activation), expected)
        rows = torch.tensor([5, 0, 5])
        assert torch.equal(ops.take_rows(x, rows), x[rows])


def test_the_registry_discovers_the_folder(page_folder: Path) -> None:
    registry = BackendRegistry([page_folder])
    assert [backend.name for backend in registry.backends] == ["cpu", "cuda", "numpy_cpu", "reference"]
    assert registry.open("cpu", "numpy_cpu")[1].name == "numpy_cpu"


def test_an_operation_is_recorded_from_the_declaration_on_the_page() -> None:
    (declaration,) = re.findall(r"^```\n(@operation.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    body = declaration.replace("@abstractmethod\n", "") + "    return weight * x / (1 + x.abs())\n"
    namespace = {"operation": operation, "CFunction": CFunction, "Tensor": torch.Tensor}
    exec(compile(body, "declaration.py", "exec"), namespace)
    ops: Any = type("MoreOps", (ReferenceOps,), {"softsign": namespace["softsign"]})()
    x, other_input, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    plan = record(ops, {"x": x}, lambda recording: [vars(type(recording))["softsign"](recording, x, weight)])
    assert torch.equal(plan.replay(ops, {"x": other_input})[0], ops.softsign(other_input, weight))


def test_paths_and_names_on_the_page_exist() -> None:
    paths = re.findall(r"`((?:penstock|tests|kernels|benchmarks)/[\w/]+\.py)`", PAGE)
    assert len(paths) >= 5
    for path in paths:
        assert (ROOT / path).is_file() or (ROOT / "penstock" / path).is_file(), path
    for operation_name in re.findall(r"`(linear|attention|take_rows|gated_activation)`", PAGE):
        assert operation_name in OPERATIONS
    fields = re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE)
    known_names = {field.name for field in dataclasses.fields(Backend)}
    assert set(fields) == known_names | set(inspect.signature(operation).parameters)
