"""LFM2: ``<|tool_call_start|>[f(a=1)]<|tool_call_end|>``."""

from __future__ import annotations

from penstock.serve.parsers.formats.pythonic import PythonicCalls

FORMAT = PythonicCalls(
    "lfm2",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    hints=("List of tools: ", "ns.system_prompt"),
)
