"""Runs scripts of the playground in Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.documents import ROOT

PLAYGROUND = ROOT / "penstock" / "serve" / "playground"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def run_node(folder: Path, code: str, *extra_files: Path) -> Any:
    """Run code next to the playground's modules and further files. Return the JSON that it prints."""
    for path in (*PLAYGROUND.glob("*.js"), *extra_files):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "check.js").write_text(code)
    completed = subprocess.run(
        ["node", "check.js"], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)
