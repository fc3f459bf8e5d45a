"""Granite 3: ``<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]``."""

from __future__ import annotations

from penstock.serve.parsers.formats.json_calls import JsonCalls

FORMAT = JsonCalls("granite", "<|tool_call|>", is_list=True, hints=("<|tool_call|>",))
