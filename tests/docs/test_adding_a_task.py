"""docs/adding-a-task.md: the page's check passes with the page's files and fails with faulty files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import ROOT

PAGE = (ROOT / "docs" / "adding-a-task.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE))


def run_page_check(folder: Path, changes: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Write the page's files with replaced texts, and run the page's check in the folder of the files."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for old, new in (changes or {}).items():
            text = text.replace(old, new)
        path.write_text(text)
    return subprocess.run(
        [sys.executable, "-c", (folder / "check.py").read_text()],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_block_is_a_file_of_the_page() -> None:
    assert PAGE.count("```") == 2 * len(FILES) == 12


def test_the_check_of_the_page_passes(tmp_path: Path) -> None:
    completed = run_page_check(tmp_path)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids = [ord": "ids = [1 + ord"}, "AssertionError"),
        ({"context_types = (EmbeddingsContext,)": "context_types = ()"}, "TaskMismatchError"),
        ({"tasks={**TASKS, RECORD.task: RECORD}": "tasks={}"}, "has no pipeline for the task embeddings-"),
        ({'["MeanModel"]': '["MeanForCausalLM"]'}, "no pipeline for the task text-generation"),
    ],
    ids=str,
)
def test_the_check_detects_an_error(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    completed = run_page_check(tmp_path, changes)
    assert completed.returncode != 0
    assert message in completed.stderr
