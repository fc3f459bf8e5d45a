"""Hermes 2 Pro, Qwen 2 to 3 and most ChatML models, the embedded model too:
``<tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>``."""

from __future__ import annotations

from penstock.serve.parsers.formats.json_calls import JsonCalls

FORMAT = JsonCalls(
    "hermes", "<tool_call>", "</tool_call>", padding="\n", separator="\n", hints=("<tool_call>", "arguments")
)
