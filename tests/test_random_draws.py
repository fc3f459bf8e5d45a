"""The default run draws the same examples each time; `--random` draws others, and more of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_draws import examples

drawn = []

@settings(max_examples=examples(20))
@given(st.text(min_size=3, max_size=3))
def test_property(text):
    drawn.append(text)

def test_report():
    with open("drawn", "w") as file:
        print(*map(ascii, drawn), sep="\\n", file=file)

@pytest.mark.random
def test_at_random():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_some.py").write_text(TESTS)
    return tmp_path


def run(folder: Path, *options: str, **environment: str) -> tuple[list[str], str]:
    """(the examples that the property test drew, what pytest printed)."""
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "tests.conftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, "-p", "no:cacheprovider", "test_some.py", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    drawn = folder / "drawn"
    return drawn.read_text().splitlines() if drawn.exists() else [], done.stdout


def test_the_default_run_draws_the_same_examples(folder: Path) -> None:
    first, output = run(folder, PYTHONHASHSEED="1")
    assert len(first) == 20
    assert "1 deselected" in output
    (folder / "other.py").write_text(f"SOME = {[f'{number:03}' for number in range(200)]}")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", folder)))
    again, _ = run(folder, "-p", "other", PYTHONHASHSEED="2", PYTHONPATH=path)
    assert again == first, "constants of a module that only this run loads were drawn"


def test_a_random_run_draws_others_and_more(folder: Path) -> None:
    first, output = run(folder, "--random")
    assert len(first) == 200
    assert "3 passed" in output
    assert run(folder, "--random")[0] != first


def test_the_marker_selects_property_tests(folder: Path) -> None:
    _, output = run(folder, "--random", "-m", "random", "-v")
    assert "2 passed, 1 deselected" in output
