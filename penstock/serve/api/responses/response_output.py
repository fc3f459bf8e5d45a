"""Build the items of a response, and the events that announce them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from uuid import uuid4

from penstock.serve.api.responses.response_input import CUSTOM_ARGUMENT, encoded_reasoning
from penstock.serve.parsers import Content, Event, Reasoning, ToolCallArguments, ToolCallStart


class OutputItems:
    """The output items of one response, built from the events of the parser.

    Args:
        custom_tools: the names of the custom tools of the request.
        encodes_reasoning: whether reasoning items have ``encrypted_content``.
    """

    def __init__(self, custom_tools: Collection[str] = (), *, encodes_reasoning: bool = False) -> None:
        self.items: list[dict[str, object]] = []
        self._custom_tools = custom_tools
        self._encodes_reasoning = encodes_reasoning
        self._open = ""
        """The type of the last item while it is in progress."""
        self._pieces: list[str] = []
        self._logprobs: list[object] = []

    def add(self, events: Sequence[Event], logprobs: Sequence[object] = ()) -> list[dict[str, object]]:
        """Add output. Return the events that announce it, without sequence numbers.

        `logprobs` are those of the tokens of the text in `events`.
        """
        said: list[dict[str, object]] = []
        for event in events:
            match event:
                case Content():
                    self._begin("message", said)
                    said.append(self._delta("response.output_text.delta", event.text, logprobs=[*logprobs]))
                    self._logprobs += logprobs
                    logprobs = ()
                case Reasoning():
                    self._begin("reasoning", said)
                    said.append(self._delta("response.reasoning_text.delta", event.text))
                case ToolCallStart():
                    said += self.close()
                    self._begin_call(event, said)
                case ToolCallArguments():
                    self._pieces.append(event.text)
                    if self._open == "function_call":
                        said.append(self._event("response.function_call_arguments.delta", delta=event.text))
        return said

    def finish(self, *, is_complete: bool) -> list[dict[str, object]]:
        """End the output. A response without output has an empty message."""
        said: list[dict[str, object]] = []
        if not self.items:
            self._begin("message", said)
        return said + self.close(is_complete=is_complete)

    def close(self, *, is_complete: bool = True) -> list[dict[str, object]]:
        """End the item that is in progress, if any."""
        if not self._open:
            return []
        kind, text, item = self._open, "".join(self._pieces), self.items[-1]
        item["status"] = "completed" if is_complete else "incomplete"
        match kind:
            case "message":
                part = {**_text_part(text), "logprobs": self._logprobs}
                item["content"] = [part]
                said = [
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
                said = [
                    self._event("response.reasoning_text.done", content_index=0, text=text),
                    self._event("response.content_part.done", content_index=0, part=part),
                ]
            case "function_call":
                item["arguments"] = text
                said = [
                    self._event("response.function_call_arguments.done", arguments=text, name=item["name"])
                ]
            case _:
                item["input"] = _custom_input(text)
                said = [
                    self._event("response.custom_tool_call_input.delta", delta=item["input"]),
                    self._event("response.custom_tool_call_input.done", input=item["input"]),
                ]
        said.append(self._item_event("response.output_item.done"))
        self._open, self._pieces, self._logprobs = "", [], []
        return said

    def _begin(self, kind: str, said: list[dict[str, object]]) -> None:
        """Begin a message or a reasoning item unless one is in progress."""
        if self._open == kind:
            return
        said += self.close()
        self._open = kind
        if kind == "message":
            item: dict[str, object] = {"id": new_id("msg"), "type": "message", "role": "assistant"}
            part = _text_part("")
        else:
            item = {"id": new_id("rs"), "type": "reasoning", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self.items.append({**item, "status": "in_progress", "content": []})
        said.append(self._item_event("response.output_item.added"))
        said.append(self._event("response.content_part.added", content_index=0, part=part))

    def _begin_call(self, call: ToolCallStart, said: list[dict[str, object]]) -> None:
        if call.name in self._custom_tools:
            self._open = "custom_tool_call"
            item = {"id": new_id("ctc"), "type": self._open, "input": ""}
        else:
            self._open = "function_call"
            item = {"id": new_id("fc"), "type": self._open, "arguments": ""}
        self.items.append({**item, "status": "in_progress", "call_id": call.id, "name": call.name})
        said.append(self._item_event("response.output_item.added"))

    def _delta(self, kind: str, text: str, **more: object) -> dict[str, object]:
        self._pieces.append(text)
        return self._event(kind, content_index=0, delta=text, **more)

    def _event(self, kind: str, **more: object) -> dict[str, object]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}

    def _item_event(self, kind: str) -> dict[str, object]:
        return {"type": kind, "output_index": len(self.items) - 1, "item": {**self.items[-1]}}


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
