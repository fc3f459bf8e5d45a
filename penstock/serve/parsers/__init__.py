"""Split the text of a model into content, reasoning and tool calls.

A model has one `ParserFactory`. `ParserFactory.new` creates an `OutputParser` for each choice.
"""

from __future__ import annotations

from penstock.serve.parsers.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    merge_events,
)
from penstock.serve.parsers.output_parser import OutputParser
from penstock.serve.parsers.parser_factory import ParserFactory
from penstock.serve.parsers.reasoning import prompt_opens_reasoning

__all__ = [
    "Content",
    "Event",
    "OutputParser",
    "ParserFactory",
    "Reasoning",
    "ToolCallArguments",
    "ToolCallStart",
    "merge_events",
    "prompt_opens_reasoning",
]
