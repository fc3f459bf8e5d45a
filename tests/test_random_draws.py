"""Each default run draws the same examples; `--random` draws other examples, and more of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEST_MODULE = """
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_draws import num_examples

@pytest.fixture(scope="module")
def drawn():
    texts = []
    yield texts
    with open("drawn", "w") as file:
        print(*map(ascii, texts), sep="\\n", file=file)

@settings(max_examples=num_examples(20))
@given(text=st.text(min_size=3, max_size=3))
def test_property(text, drawn):
    drawn.append(text)

def test_plain():
    pass

@pytest.mark.random
def test_at_random():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_some.py").write_text(TEST_MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = random\n  slow\n  timeout\n")
    return tmp_path


def run_pytest(folder: Path, *options: str, **environment: str) -> tuple[list[str], str]:
    """Run pytest and return (the examples that the property test drew, the output of pytest)."""
    plugins = ("no:cacheprovider", "_hypothesis_pytestplugin", "tests.conftest")
    flags = ["--rootdir", str(folder), *(part for name in plugins for part in ("-p", name))]
    variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, "test_some.py", *options],
        cwd=folder,
        env={**os.environ, **variables, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    drawn_file = folder / "drawn"
    return drawn_file.read_text().splitlines() if drawn_file.exists() else [], result.stdout


def test_the_default_run_draws_the_same_examples(folder: Path) -> None:
    first, output = run_pytest(folder, PYTHONHASHSEED="1")
    assert len(first) == 20
    assert "1 deselected" in output
    (folder / "other.py").write_text(f"SOME = {[f'{number:03}' for number in range(200)]}")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", folder)))
    second, _ = run_pytest(folder, "-p", "other", PYTHONHASHSEED="2", PYTHONPATH=path)
    assert second == first, "constants of a module that only this run loads were used as examples"


def test_a_random_run_draws_other_and_more_examples(folder: Path) -> None:
    first, output = run_pytest(folder, "--random")
    assert len(first) == 200
    assert "3 passed" in output
    second, output = run_pytest(folder, "--random", "-m", "random")
    assert len(second) == 200
    assert second != first
    assert "2 passed, 1 deselected" in output, "the marker selects property tests"
