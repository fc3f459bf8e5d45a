"""Types: lazily loaded names, annotations with `Any`, the options of `LLM`, and user code under mypy."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from support.documents import Block, code_blocks

import penstock
from penstock.config.settings import NUM_BYTES
from penstock.driver import DeviceSpec
from penstock.pipelines.config import ConfigField, PipelineOptions, config_fields

PACKAGE = Path(penstock.__file__).parent
CHECKED_PAGES = ("README.md", "features.md")
PATH_SETTINGS = ("gguf_file", "chat_template", "lora_dir", "draft_model_path")
"""Settings that accept a path object."""
LAZY_MODULES = sorted(
    file.relative_to(PACKAGE.parent)
    for file in PACKAGE.rglob("*.py")
    if re.search(r"^(    )?(def __getattr__\(name|__getattr__ = )", file.read_text(), re.MULTILINE)
    and file.name != "lazy_names.py"
)


def test_lazy_modules_are_found() -> None:
    assert len(LAZY_MODULES) >= 5


@pytest.mark.parametrize("file", LAZY_MODULES, ids=str)
def test_each_lazy_name_exists_and_is_visible_to_type_checkers(file: Path) -> None:
    tree = ast.parse((PACKAGE.parent / file).read_text())
    module = import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    conditionals = [node for node in tree.body if isinstance(node, ast.If)]
    imported_names = {
        alias.asname or alias.name
        for node in [
            *tree.body,
            *(statement for conditional in conditionals for statement in conditional.body),
        ]
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    defined_names = {getattr(node, "name", None) for node in tree.body} | {"__version__"}
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    defined_names |= {
        target.id for node in assignments for target in node.targets if isinstance(target, ast.Name)
    }
    assert set(module.__all__) <= imported_names | defined_names, "a name is not visible to type checkers"
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018
    getattr_conditionals = [
        conditional
        for conditional in conditionals
        if any("__getattr__" in ast.unparse(node) for node in conditional.body)
    ]
    assert [ast.unparse(conditional.test) for conditional in getattr_conditionals] == ["not TYPE_CHECKING"], (
        "type checkers must not see `__getattr__`: it would make any name valid"
    )


def test_the_number_of_any_annotations_is_bounded() -> None:
    texts = [file.read_text() for file in PACKAGE.rglob("*.py")]
    trees = [ast.parse(text) for text in texts if "Any" in text]
    names = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assert sum(name.id == "Any" for name in names) <= 150, "write the type: `Any` disables type checks"


def checked_code_blocks() -> list[Block]:
    return [block for block in code_blocks("python") if block.page.name in CHECKED_PAGES]


def test_the_pages_have_code_to_check() -> None:
    pages = [block.page.name for block in checked_code_blocks()]
    assert {*pages} == {*CHECKED_PAGES}
    assert len(pages) >= 18


def test_the_options_of_llm_are_the_settings_in_order() -> None:
    options = get_type_hints(PipelineOptions)
    expected = {
        name: option_type(field)
        for field in config_fields()
        for name in (field.name, *field.aliases)
        if name != "model_path"
    }
    assert options == {"config_file": str | PathLike[str] | None, **expected}, (
        "change PipelineOptions in penstock/config/options.py"
    )
    assert [*options] == ["config_file", *expected], "keep the order of the settings"
    assert PipelineOptions.__required_keys__ == frozenset()


def option_type(field: ConfigField) -> Any:
    if field.type == tuple[DeviceSpec, ...]:
        return str | tuple[DeviceSpec, ...] | list[DeviceSpec] | None
    if field.type == tuple[str, ...]:
        return str | tuple[str, ...] | list[str] | None
    if field.name in PATH_SETTINGS:
        return str | PathLike[str] | None
    if field.rule is NUM_BYTES:
        return int | str | None  # such as "4GiB"
    return field.type | None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_user_code_passes_mypy_strict(tmp_path: Path) -> None:
    """Check user code and the code of the documentation outside this project, without its mypy settings."""
    file_names = ["user.py", "type_errors.py"]
    for name in file_names:
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    for block in checked_code_blocks():
        file_names.append(f"{block.page.stem.lower()}_{block.line}.py")
        (tmp_path / file_names[-1]).write_text(block.code)
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *file_names],
        cwd=tmp_path,
        env={"MYPYPATH": str(PACKAGE.parent), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
