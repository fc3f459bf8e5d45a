"""The example `own_model.py` runs unchanged, and has fewer than 150 lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


def test_the_example_prints_continuations_and_has_fewer_than_150_lines() -> None:
    result = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("The river runs to the mill")
    assert "The wheel turns the" in result.stdout
    assert len(EXAMPLE.read_text().splitlines()) < 150
