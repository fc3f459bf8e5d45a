"""Builds the items of a response, and the corresponding events."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from uuid import uuid4

from penstock.serve.api.responses.mcp_events import ApprovedCall, McpEvent, ToolOutcome
from penstock.serve.api.responses.offered_tools import OfferedTool, OfferedTools, ToolListing
from penstock.serve.api.responses.response_input import encoded_reasoning
from penstock.serve.api.responses.tool_input import CUSTOM_ARGUMENT
from penstock.serve.parsers import Content, Event, Reasoning, ToolCallArguments, ToolCallStart

_ARGUMENT_EVENTS = {
    "function_call": "response.function_call_arguments",
    "mcp_call": "response.mcp_call_arguments",
}
"""Type of an item whose arguments are streamed -> the beginning of the names of the events."""


class OutputItems:
    """The output items of one response, built from the events of the parser.

    Args:
        custom_tools: the names of the custom tools of the request.
        offered: the tools of tool servers.
        encodes_reasoning: whether reasoning items have ``encrypted_content``.
    """

    def __init__(
        self,
        custom_tools: Collection[str] = (),
        offered: OfferedTools | None = None,
        *,
        encodes_reasoning: bool = False,
    ) -> None:
        self.items: list[dict[str, object]] = []
        self._custom_tools = custom_tools
        self._offered = offered or OfferedTools()
        self._pending_calls: dict[str, int] = {}
        """The calls of tool servers without an outcome: id of the call -> index of the item."""
        self._encodes_reasoning = encodes_reasoning
        self._open = ""
        """The type of the last item while it is in progress."""
        self._pieces: list[str] = []
        self._logprobs: list[object] = []

    def add(self, events: Sequence[Event], logprobs: Sequence[object] = ()) -> list[dict[str, object]]:
        """Add output. Return the corresponding events, without sequence numbers.

        `logprobs` are those of the tokens of the text in `events`.
        """
        emitted: list[dict[str, object]] = []
        for event in events:
            match event:
                case Content():
                    self._begin("message", emitted)
                    emitted.append(
                        self._delta("response.output_text.delta", event.text, logprobs=[*logprobs])
                    )
                    self._logprobs += logprobs
                    logprobs = ()
                case Reasoning():
                    self._begin("reasoning", emitted)
                    emitted.append(self._delta("response.reasoning_text.delta", event.text))
                case ToolCallStart():
                    emitted += self.close()
                    self._begin_call(event, emitted)
                case ToolCallArguments():
                    self._pieces.append(event.text)
                    if self._open in _ARGUMENT_EVENTS:
                        emitted.append(self._event(f"{_ARGUMENT_EVENTS[self._open]}.delta", delta=event.text))
        return emitted

    def add_mcp(self, events: Sequence[McpEvent]) -> list[dict[str, object]]:
        """Add tool lists, approved calls and outcomes of tool servers, and return the events of the API."""
        emitted: list[dict[str, object]] = self.close() if events else []
        for event in events:
            match event:
                case ToolListing():
                    emitted += self._list_tools(event)
                case ApprovedCall():
                    self._begin_mcp_call(event.call_id, event.tool, emitted, event.approval_request_id)
                    self._pieces.append(event.arguments)
                    emitted.append(self._event("response.mcp_call_arguments.delta", delta=event.arguments))
                    emitted += self.close()
                case ToolOutcome():
                    emitted += self._end_mcp_call(event)
        return emitted

    def finish(self, *, is_complete: bool) -> list[dict[str, object]]:
        """End the output. A response without output has an empty message."""
        emitted: list[dict[str, object]] = []
        if all(item["type"] == "mcp_list_tools" for item in self.items):
            self._begin("message", emitted)
        emitted += self.close(is_complete=is_complete)
        return emitted + self.end_calls()

    def end_calls(self) -> list[dict[str, object]]:
        """End the items of tool-server calls that have no outcome, with the status ``incomplete``."""
        emitted = []
        for index in self._pending_calls.values():
            self.items[index]["status"] = "incomplete"
            emitted.append(self._item_event("response.output_item.done", index))
        self._pending_calls.clear()
        return emitted

    def close(self, *, is_complete: bool = True) -> list[dict[str, object]]:
        """End the item that is in progress, if any. For a tool-server call, end only its arguments."""
        if not self._open:
            return []
        kind, text, item = self._open, "".join(self._pieces), self.items[-1]
        if kind != "mcp_approval_request":  # the only item without a status
            item["status"] = "completed" if is_complete else "incomplete"
        match kind:
            case "message":
                part = {**_text_part(text), "logprobs": self._logprobs}
                item["content"] = [part]
                emitted = [
                    self._event(
                        "response.output_text.done", content_index=0, text=text, logprobs=self._logprobs
                    ),
                    self._event("response.content_part.done", content_index=0, part=part),
                ]
            case "reasoning":
                part = {"type": "reasoning_text", "text": text}
                item["content"] = [part]
                if self._encodes_reasoning:
                    item["encrypted_content"] = encoded_reasoning(text)
                emitted = [
                    self._event("response.reasoning_text.done", content_index=0, text=text),
                    self._event("response.content_part.done", content_index=0, part=part),
                ]
            case "function_call":
                item["arguments"] = text
                emitted = [
                    self._event("response.function_call_arguments.done", arguments=text, name=item["name"])
                ]
            case "mcp_approval_request":
                item["arguments"] = text
                emitted = []
            case "mcp_call":
                item["arguments"], item["status"] = text, "calling"
                emitted = [self._event("response.mcp_call_arguments.done", arguments=text)]
            case _:
                item["input"] = _custom_input(text)
                emitted = [
                    self._event("response.custom_tool_call_input.delta", delta=item["input"]),
                    self._event("response.custom_tool_call_input.done", input=item["input"]),
                ]
        if kind != "mcp_call":
            emitted.append(self._item_event("response.output_item.done"))
        self._open, self._pieces, self._logprobs = "", [], []
        return emitted

    def _begin(self, kind: str, emitted: list[dict[str, object]]) -> None:
        """Begin a message or a reasoning item unless one is in progress."""
        if self._open == kind:
            return
        emitted += self.close()
        self._open = kind
        if kind == "message":
            item: dict[str, object] = {"id": new_id("msg"), "type": "message", "role": "assistant"}
            part = _text_part("")
        else:
            item = {"id": new_id("rs"), "type": "reasoning", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self.items.append({**item, "status": "in_progress", "content": []})
        emitted.append(self._item_event("response.output_item.added"))
        emitted.append(self._event("response.content_part.added", content_index=0, part=part))

    def _begin_call(self, call: ToolCallStart, emitted: list[dict[str, object]]) -> None:
        offered = self._offered.functions.get(call.name)
        if offered is not None:
            if offered.needs_approval:
                self._begin_approval_request(offered, emitted)
            else:
                self._begin_mcp_call(call.id, offered, emitted)
            return
        if call.name in self._custom_tools:
            self._open = "custom_tool_call"
            item = {"id": new_id("ctc"), "type": self._open, "input": ""}
        else:
            self._open = "function_call"
            item = {"id": new_id("fc"), "type": self._open, "arguments": ""}
        self.items.append({**item, "status": "in_progress", "call_id": call.id, "name": call.name})
        emitted.append(self._item_event("response.output_item.added"))

    def _list_tools(self, listing: ToolListing) -> list[dict[str, object]]:
        """Add the tools of a server."""
        item = {"id": new_id("mcpl"), "type": "mcp_list_tools", "server_label": listing.label}
        self.items.append({**item, "tools": [], "error": None})
        emitted = [
            self._item_event("response.output_item.added"),
            self._event("response.mcp_list_tools.in_progress"),
        ]
        self.items[-1] |= {"tools": [*listing.tools], "error": listing.error}
        end = "completed" if listing.error is None else "failed"
        emitted.append(self._event(f"response.mcp_list_tools.{end}"))
        emitted.append(self._item_event("response.output_item.done"))
        return emitted

    def _begin_approval_request(self, tool: OfferedTool, emitted: list[dict[str, object]]) -> None:
        self._open = "mcp_approval_request"
        item = {"id": new_id("mcpr"), "type": self._open, "server_label": tool.label}
        self.items.append({**item, "name": tool.tool.name, "arguments": ""})
        emitted.append(self._item_event("response.output_item.added"))

    def _begin_mcp_call(
        self,
        call_id: str,
        tool: OfferedTool,
        emitted: list[dict[str, object]],
        approval_request_id: str | None = None,
    ) -> None:
        self._open = "mcp_call"
        item: dict[str, object] = {
            "id": new_id("mcp"),
            "type": self._open,
            "status": "in_progress",
            "approval_request_id": approval_request_id,
            "server_label": tool.label,
            "name": tool.tool.name,
            "arguments": "",
            "output": None,
            "error": None,
        }
        self._pending_calls[call_id] = len(self.items)
        self.items.append(item)
        emitted.append(self._item_event("response.output_item.added"))
        emitted.append(self._event("response.mcp_call.in_progress"))

    def _end_mcp_call(self, outcome: ToolOutcome) -> list[dict[str, object]]:
        index = self._pending_calls.pop(outcome.call_id)
        output = outcome.output
        status = "completed" if output.error is None else "failed"
        self.items[index] |= {"status": status, "output": output.output, "error": output.error}
        return [
            {
                "type": f"response.mcp_call.{status}",
                "item_id": self.items[index]["id"],
                "output_index": index,
            },
            self._item_event("response.output_item.done", index),
        ]

    def _delta(self, kind: str, text: str, **more: object) -> dict[str, object]:
        self._pieces.append(text)
        return self._event(kind, content_index=0, delta=text, **more)

    def _event(self, kind: str, **more: object) -> dict[str, object]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}

    def _item_event(self, kind: str, index: int = -1) -> dict[str, object]:
        item = self.items[index]
        return {"type": kind, "output_index": index % len(self.items), "item": {**item}}


def new_id(kind: str) -> str:
    """Return a random id: ``msg_...`` for the kind ``msg``."""
    return f"{kind}_{uuid4().hex}"


def _text_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _custom_input(arguments: str) -> str:
    """Return the text in the arguments of a custom tool; unfinished arguments are returned as they are."""
    try:
        value = json.loads(arguments)[CUSTOM_ARGUMENT]
    except (ValueError, KeyError, TypeError):
        return arguments
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
