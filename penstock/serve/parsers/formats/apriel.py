"""Apriel: ``<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>``."""

from __future__ import annotations

from penstock.serve.parsers.formats.json_calls import JsonCalls

FORMAT = JsonCalls("apriel", "<tool_calls>", "</tool_calls>", is_list=True, hints=("<tool_calls>[",))
