"""Command R7B and later:
``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>``."""

from __future__ import annotations

from penstock.serve.parsers.formats.json_calls import JsonCalls

FORMAT = JsonCalls(
    "cohere",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    is_list=True,
    hints=("<|START_ACTION|>",),
    name_key="tool_name",
    arguments_key="parameters",
    first_keys='"tool_call_id": "0", ',
)
