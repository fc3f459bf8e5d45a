"""Default runs repeat the examples of property tests. Runs with `--random` draw more examples, at random."""

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
def examples():
    texts = []
    yield texts
    with open("examples.txt", "w") as file:
        print(*map(ascii, texts), sep="\\n", file=file)

@settings(max_examples=num_examples(20))
@given(text=st.text(min_size=3, max_size=3))
def test_property(text, examples):
    examples.append(text)

def test_plain():
    pass

@pytest.mark.random
def test_at_random():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_example.py").write_text(TEST_MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = random\n  slow\n  timeout\n")
    return tmp_path


def run_pytest(folder: Path, *options: str, **environment: str) -> tuple[list[str], str]:
    """Run pytest. Return the examples of the property test, and the output of pytest."""
    plugins = ("no:cacheprovider", "_hypothesis_pytestplugin", "tests.conftest")
    flags = ["--rootdir", str(folder), *(argument for name in plugins for argument in ("-p", name))]
    variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, "test_example.py", *options],
        cwd=folder,
        env={**os.environ, **variables, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    examples_file = folder / "examples.txt"
    return examples_file.read_text().splitlines() if examples_file.exists() else [], result.stdout


def test_default_runs_draw_the_same_examples(folder: Path) -> None:
    first_examples, output = run_pytest(folder, PYTHONHASHSEED="1")
    assert len(first_examples) == 20
    assert "1 deselected" in output
    (folder / "other.py").write_text(f"SOME = {[f'{number:03}' for number in range(200)]}")
    python_path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", folder)))
    second_examples, _ = run_pytest(folder, "-p", "other", PYTHONHASHSEED="2", PYTHONPATH=python_path)
    assert second_examples == first_examples, "constants of the additional module were used as examples"


def test_random_runs_draw_more_examples_that_differ_between_runs(folder: Path) -> None:
    first_examples, output = run_pytest(folder, "--random")
    assert len(first_examples) == 200
    assert "3 passed" in output
    second_examples, output = run_pytest(folder, "--random", "-m", "random")
    assert len(second_examples) == 200
    assert second_examples != first_examples
    assert "2 passed, 1 deselected" in output, "property tests and tests marked random run"
