"""docs/configuration.md agrees with the configuration classes."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "write_configuration.py"))
    written_page = (ROOT / "docs" / "configuration.md").read_text()
    assert written_page == tool["page"](), "run: python tools/write_configuration.py"
