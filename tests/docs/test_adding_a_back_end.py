"""The walk of docs/adding-a-back-end.md, followed: its files written, its check run, its mistakes seen."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support.documents import ROOT

from penstock.kernels.ops import OPERATIONS
from penstock.kernels.reference import ReferenceOps

PAGE = (ROOT / "docs" / "adding-a-back-end.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("numpy_cpu")]:
        del sys.modules[name]


def run_check(folder: Path) -> None:
    exec(compile((folder / "check.py").read_text(), "check.py", "exec"), {"__name__": "__main__"})


def test_every_block_is_a_file_of_the_walk() -> None:
    assert sorted(FILES) == ["check.py", "numpy_cpu/__init__.py", "numpy_cpu/ops.py"]
    assert PAGE.count("```") == 2 * len(FILES)


def test_the_walk(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_check(folder)
    assert capsys.readouterr().out == "{'gated_activation': 'numpy', 'take_rows': 'numpy'}\n"


@pytest.mark.parametrize(
    ("right", "wrong"), [("* up", "+ up"), ("-gate", "gate"), ("[rows.numpy()]", "[: len(rows)]")]
)
def test_a_wrong_turn_is_seen(folder: Path, right: str, wrong: str) -> None:
    file = folder / "numpy_cpu" / "ops.py"
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, wrong))
    with pytest.raises(AssertionError):
        run_check(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_operations_are_the_references(folder: Path, dtype: torch.dtype) -> None:
    reference = ReferenceOps()
    for ops in import_module("numpy_cpu").variants():
        x = (100 * torch.randn(33, 64)).to(dtype)
        for activation in ("silu", "gelu"):
            expected = reference.gated_activation(x, activation)
            torch.testing.assert_close(ops.gated_activation(x, activation), expected)
        rows = torch.tensor([5, 0, 5])
        assert torch.equal(ops.take_rows(x, rows), x[rows])


def test_what_the_page_names_exists() -> None:
    paths = re.findall(r"`((?:penstock|tests|kernels|benchmarks)/[\w/]+\.py)`", PAGE)
    assert len(paths) >= 5
    for path in paths:
        assert (ROOT / path).is_file() or (ROOT / "penstock" / path).is_file(), path
    for operation in re.findall(r"`(linear|attention|take_rows|gated_activation)`", PAGE):
        assert operation in OPERATIONS
