"""The tool-call formats of models. `table.py` lists all formats, one row per format."""

from __future__ import annotations

from penstock.serve.parsers.formats.table import TOOL_FORMATS
from penstock.serve.parsers.formats.tool_format import ToolFormat

__all__ = ["TOOL_FORMATS", "ToolFormat"]
