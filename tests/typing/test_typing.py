"""Names that load lazily are there, and have their types for those who check theirs."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import penstock

PACKAGE = Path(penstock.__file__).parent
LAZY = sorted(
    file.relative_to(PACKAGE.parent)
    for file in PACKAGE.rglob("*.py")
    if "\n    def __getattr__(name: str)" in file.read_text() or "\ndef __getattr__" in file.read_text()
)


def test_there_are_some() -> None:
    assert len(LAZY) >= 5


@pytest.mark.parametrize("file", LAZY, ids=str)
def test_each_lazy_name_is_typed_and_there(file: Path) -> None:
    tree = ast.parse((PACKAGE.parent / file).read_text())
    module = import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    guarded = [node for node in tree.body if isinstance(node, ast.If)]
    names = {
        alias.asname or alias.name
        for node in [*tree.body, *(inner for one in guarded for inner in one.body)]
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    defined = {getattr(node, "name", None) for node in tree.body} | {"__version__"}
    assert set(module.__all__) <= names | defined, "a name that type checkers do not see"
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018
    hidden = [one for one in guarded if "__getattr__" in {getattr(node, "name", "") for node in one.body}]
    assert [ast.unparse(one.test) for one in hidden] == ["not TYPE_CHECKING"], "any name would do"


@pytest.mark.slow
def test_a_users_code_is_checked(tmp_path: Path) -> None:
    """As from outside: without this project's settings."""
    shutil.copy(Path(__file__).with_name("user.py"), tmp_path)
    command = [sys.executable, "-m", "mypy", "--strict", "user.py"]
    child = subprocess.run(
        command,
        cwd=tmp_path,
        env={"MYPYPATH": str(PACKAGE.parent), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout
