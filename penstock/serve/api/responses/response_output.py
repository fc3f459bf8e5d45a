"""Builds the output items of a response and the stream events for them."""

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
"""Type of an item whose arguments are streamed -> prefix of the names of its events."""


class OutputItems:
    """Builds the output items of one response from the events of the output parser and of tool servers (MCP).

    Args:
        custom_tools: the names of the custom tools of the request.
        offered_tools: the tools of tool servers that the request offers to the model.
        encodes_reasoning: whether reasoning items have ``encrypted_content``.
    """

    def __init__(
        self,
        custom_tools: Collection[str] = (),
        offered_tools: OfferedTools | None = None,
        *,
        encodes_reasoning: bool = False,
    ) -> None:
        self.items: list[dict[str, object]] = []
        self._custom_tools = custom_tools
        self._offered_tools = offered_tools or OfferedTools()
        self._pending_calls: dict[str, int] = {}
        """Id of each tool-server call without an outcome -> index of its item."""
        self._encodes_reasoning = encodes_reasoning
        self._open_type = ""
        """The type of the last item while this item is in progress, else an empty string."""
        self._text_parts: list[str] = []
        self._logprobs: list[object] = []

    def add(self, events: Sequence[Event], logprobs: Sequence[object] = ()) -> list[dict[str, object]]:
        """Add model output. Return the stream events for it, without sequence numbers.

        Args:
            events: the events of the output parser.
            logprobs: the log probabilities of the text in `events`, one entry per token. All of them are
                added to the first `Content` event. They are dropped if `events` has no `Content` event.
        """
        new_events: list[dict[str, object]] = []
        for event in events:
            match event:
                case Content():
                    self._begin("message", new_events)
                    new_events.append(
                        self._delta("response.output_text.delta", event.text, logprobs=[*logprobs])
                    )
                    self._logprobs += logprobs
                    logprobs = ()
                case Reasoning():
                    self._begin("reasoning", new_events)
                    new_events.append(self._delta("response.reasoning_text.delta", event.text))
                case ToolCallStart():
                    new_events += self.close()
                    self._begin_call(event, new_events)
                case ToolCallArguments():
                    self._text_parts.append(event.text)
                    if self._open_type in _ARGUMENT_EVENTS:
                        new_events.append(
                            self._event(f"{_ARGUMENT_EVENTS[self._open_type]}.delta", delta=event.text)
                        )
        return new_events

    def add_mcp(self, events: Sequence[McpEvent]) -> list[dict[str, object]]:
        """Add tool lists, approved calls and outcomes of tool servers. Return the stream events for them.

        If there are events, the item in progress ends first.
        """
        new_events: list[dict[str, object]] = self.close() if events else []
        for event in events:
            match event:
                case ToolListing():
                    new_events += self._list_tools(event)
                case ApprovedCall():
                    self._begin_mcp_call(event.call_id, event.tool, new_events, event.approval_request_id)
                    self._text_parts.append(event.arguments)
                    new_events.append(self._event("response.mcp_call_arguments.delta", delta=event.arguments))
                    new_events += self.close()
                case ToolOutcome():
                    new_events += self._end_mcp_call(event)
        return new_events

    def finish(self, *, is_complete: bool) -> list[dict[str, object]]:
        """End the output, including calls without an outcome, and return the last stream events.

        If the output has no items, or only tool lists, an empty message is added.
        """
        new_events: list[dict[str, object]] = []
        if all(item["type"] == "mcp_list_tools" for item in self.items):
            self._begin("message", new_events)
        new_events += self.close(is_complete=is_complete)
        return new_events + self.end_calls()

    def end_calls(self) -> list[dict[str, object]]:
        """Set the status of tool-server calls without an outcome to ``incomplete``. Return the events."""
        new_events = []
        for index in self._pending_calls.values():
            self.items[index]["status"] = "incomplete"
            new_events.append(self._item_event("response.output_item.done", index))
        self._pending_calls.clear()
        return new_events

    def close(self, *, is_complete: bool = True) -> list[dict[str, object]]:
        """End the item that is in progress, if any. Return the stream events.

        The status of a call to a tool server becomes ``calling``, because the call has no outcome yet.
        """
        if not self._open_type:
            return []
        item_type, text, item = self._open_type, "".join(self._text_parts), self.items[-1]
        if item_type != "mcp_approval_request":  # items of this type have no status
            item["status"] = "completed" if is_complete else "incomplete"
        match item_type:
            case "message":
                part = {**_text_part(text), "logprobs": self._logprobs}
                item["content"] = [part]
                new_events = [
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
                new_events = [
                    self._event("response.reasoning_text.done", content_index=0, text=text),
                    self._event("response.content_part.done", content_index=0, part=part),
                ]
            case "function_call":
                item["arguments"] = text
                new_events = [
                    self._event("response.function_call_arguments.done", arguments=text, name=item["name"])
                ]
            case "mcp_approval_request":
                item["arguments"] = text
                new_events = []
            case "mcp_call":
                item["arguments"], item["status"] = text, "calling"
                new_events = [self._event("response.mcp_call_arguments.done", arguments=text)]
            case _:
                item["input"] = _custom_input(text)
                new_events = [
                    self._event("response.custom_tool_call_input.delta", delta=item["input"]),
                    self._event("response.custom_tool_call_input.done", input=item["input"]),
                ]
        if item_type != "mcp_call":
            new_events.append(self._item_event("response.output_item.done"))
        self._open_type, self._text_parts, self._logprobs = "", [], []
        return new_events

    def _begin(self, item_type: str, new_events: list[dict[str, object]]) -> None:
        """Begin a message or a reasoning item, unless an item of this type is in progress."""
        if self._open_type == item_type:
            return
        new_events += self.close()
        self._open_type = item_type
        if item_type == "message":
            item: dict[str, object] = {"id": new_id("msg"), "type": "message", "role": "assistant"}
            part = _text_part("")
        else:
            item = {"id": new_id("rs"), "type": "reasoning", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self.items.append({**item, "status": "in_progress", "content": []})
        new_events.append(self._item_event("response.output_item.added"))
        new_events.append(self._event("response.content_part.added", content_index=0, part=part))

    def _begin_call(self, call: ToolCallStart, new_events: list[dict[str, object]]) -> None:
        offered_tool = self._offered_tools.functions.get(call.name)
        if offered_tool is not None:
            if offered_tool.needs_approval:
                self._begin_approval_request(offered_tool, new_events)
            else:
                self._begin_mcp_call(call.id, offered_tool, new_events)
            return
        if call.name in self._custom_tools:
            self._open_type = "custom_tool_call"
            item = {"id": new_id("ctc"), "type": self._open_type, "input": ""}
        else:
            self._open_type = "function_call"
            item = {"id": new_id("fc"), "type": self._open_type, "arguments": ""}
        self.items.append({**item, "status": "in_progress", "call_id": call.id, "name": call.name})
        new_events.append(self._item_event("response.output_item.added"))

    def _list_tools(self, listing: ToolListing) -> list[dict[str, object]]:
        """Add the item with the tools of a server. Return the stream events."""
        item = {"id": new_id("mcpl"), "type": "mcp_list_tools", "server_label": listing.label}
        self.items.append({**item, "tools": [], "error": None})
        new_events = [
            self._item_event("response.output_item.added"),
            self._event("response.mcp_list_tools.in_progress"),
        ]
        self.items[-1] |= {"tools": [*listing.tools], "error": listing.error}
        status = "completed" if listing.error is None else "failed"
        new_events.append(self._event(f"response.mcp_list_tools.{status}"))
        new_events.append(self._item_event("response.output_item.done"))
        return new_events

    def _begin_approval_request(self, tool: OfferedTool, new_events: list[dict[str, object]]) -> None:
        self._open_type = "mcp_approval_request"
        item = {"id": new_id("mcpr"), "type": self._open_type, "server_label": tool.label}
        self.items.append({**item, "name": tool.tool.name, "arguments": ""})
        new_events.append(self._item_event("response.output_item.added"))

    def _begin_mcp_call(
        self,
        call_id: str,
        tool: OfferedTool,
        new_events: list[dict[str, object]],
        approval_request_id: str | None = None,
    ) -> None:
        self._open_type = "mcp_call"
        item: dict[str, object] = {
            "id": new_id("mcp"),
            "type": self._open_type,
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
        new_events.append(self._item_event("response.output_item.added"))
        new_events.append(self._event("response.mcp_call.in_progress"))

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

    def _delta(self, event_type: str, text: str, **members: object) -> dict[str, object]:
        self._text_parts.append(text)
        return self._event(event_type, content_index=0, delta=text, **members)

    def _event(self, event_type: str, **members: object) -> dict[str, object]:
        index = len(self.items) - 1
        return {"type": event_type, "item_id": self.items[index]["id"], "output_index": index, **members}

    def _item_event(self, event_type: str, index: int = -1) -> dict[str, object]:
        item = self.items[index]
        return {"type": event_type, "output_index": index % len(self.items), "item": {**item}}


def new_id(prefix: str) -> str:
    """Return a new random id that begins with `prefix`, for example ``msg_...`` for ``msg``."""
    return f"{prefix}_{uuid4().hex}"


def _text_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _custom_input(arguments: str) -> str:
    """Return the text in the JSON arguments of a custom tool.

    A value that is not a text is returned as JSON. Invalid JSON and arguments without the value are returned
    unchanged.
    """
    try:
        value = json.loads(arguments)[CUSTOM_ARGUMENT]
    except (ValueError, KeyError, TypeError):
        return arguments
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
