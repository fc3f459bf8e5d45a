"""Events of tool servers in a response: tool lists, approved calls, and outcomes of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.serve.api.choice_decoder import ChoiceDelta
from penstock.serve.api.responses.offered_tools import OfferedTool, ToolListing
from penstock.serve.mcp.tool_session import ToolOutput


@dataclass(frozen=True)
class ToolOutcome:
    """The outcome of a call to a tool server."""

    call_id: str
    output: ToolOutput


@dataclass(frozen=True)
class ApprovedCall:
    """A tool call that an earlier response has requested and that the client has approved."""

    call_id: str
    tool: OfferedTool
    function_name: str
    """The name of the tool in the chat request."""
    arguments: str
    approval_request_id: str


McpEvent: TypeAlias = ToolListing | ApprovedCall | ToolOutcome


@dataclass(slots=True)
class ToolDelta(ChoiceDelta):
    """A delta that has events of tool servers and no model output."""

    mcp_events: Sequence[McpEvent] = ()

    @classmethod
    def of(cls, *events: McpEvent) -> ToolDelta:
        """Return a delta with these events."""
        return cls([], [], [], mcp_events=events)
