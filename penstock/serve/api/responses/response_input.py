"""Translate a Responses request to a chat request."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.serve.api.responses.response_schema import (
    LOGPROBS,
    SAME_NAMES,
    InputItem,
    InputPart,
    ResponsesBody,
    ResponseTool,
    ToolSelection,
)
from penstock.serve.api.translation import Translation
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services

FIELDS: Mapping[str, str] = {
    "messages": "input",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.allowed_tools.tools": "tool_choice.tools",
}
"""Field of a chat request -> field of a Responses request."""

_REASONING_PREFIX = b"penstock1:"
CUSTOM_ARGUMENT = "input"
"""The only parameter of the function that stands for a custom tool."""


def chat_request(
    services: Services, body: ResponsesBody, history: Sequence[InputItem], *, hosted_tools: str
) -> Translation:
    """Return the chat request of a Responses request.

    Args:
        services: the objects that routes use.
        body: the request.
        history: the items of the previous response: its input and its output.
        hosted_tools: ``skip`` omits hosted tools, ``refuse`` refuses them.

    Raises:
        RequestProblem: 400 that names the field.
    """
    tools, tool_places = _tools(body, hosted_tools)
    messages = Messages()
    if body.instructions:
        messages.add({"role": "system", "content": body.instructions}, "instructions")
    for item in history:
        messages.add_item(item, "previous_response_id")
    if isinstance(body.input, str):
        messages.add({"role": "user", "content": body.input}, "input")
    else:
        for index, item in enumerate(body.input):
            messages.add_item(item, f"input[{index}]")
    if not messages.chat:
        raise RequestProblem(400, "input is an empty list", param="input")
    messages.merge_instructions(services.tokenizer.template_mentions("developer"))
    chat = {name: getattr(body, name) for name in SAME_NAMES if getattr(body, name) is not None}
    chat |= {"messages": messages.chat, **_format(body), **_choice(body)}
    if tools:
        chat["tools"] = tools
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.includes(LOGPROBS):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return Translation(chat, messages.places, tool_places, FIELDS)


def encoded_reasoning(text: str) -> str:
    """Return ``encrypted_content`` of a reasoning item. It is encoded, not encrypted."""
    return base64.urlsafe_b64encode(_REASONING_PREFIX + text.encode()).decode()


class Messages:
    """Builds the messages of a chat from items."""

    def __init__(self) -> None:
        self.chat: list[dict[str, Any]] = []
        self.places: list[str] = []
        """For each message, the field of its first item."""

    def add(self, message: dict[str, Any], place: str) -> None:
        """Add a message."""
        self.chat.append(message)
        self.places.append(place)

    def add_item(self, item: InputItem, place: str) -> None:
        """Add an item of the input.

        Raises:
            RequestProblem: 400; the item lacks a field, or its type is not supported.
        """
        match item.type or "message":
            case "message":
                self._add_message(item, place)
            case "function_call":
                name, arguments = _text(item, "name", place), _text(item, "arguments", place)
                self._add_call(_text(item, "call_id", place), name, arguments, place)
            case "custom_tool_call":
                arguments = json.dumps({CUSTOM_ARGUMENT: _text(item, "input", place)}, ensure_ascii=False)
                self._add_call(_text(item, "call_id", place), _text(item, "name", place), arguments, place)
            case "function_call_output" | "custom_tool_call_output":
                output = item.output
                if output is None:
                    raise _missing(f"{place}.output")
                content = output if isinstance(output, str) else _content(output, f"{place}.output")
                call_id = _text(item, "call_id", place)
                self.add({"role": "tool", "tool_call_id": call_id, "content": content}, place)
            case "reasoning":
                self._add_reasoning(item, place)
            case other:
                raise RequestProblem(
                    400,
                    f"{place} has the type {other!r}, which is not supported: send message, function_call, "
                    "function_call_output, custom_tool_call, custom_tool_call_output, reasoning or "
                    "item_reference",
                    param=f"{place}.type",
                    code="unsupported_value",
                )

    def merge_instructions(self, knows_developer: bool) -> None:
        """Merge the first system messages, since many chat templates allow only one, at the beginning."""
        roles = ("system",) if knows_developer else ("system", "developer")
        while len(self.chat) > 1 and all(message["role"] in roles for message in self.chat[:2]):
            first, second = (_parts(message["content"]) for message in self.chat[:2])
            separator = [{"type": "text", "text": "\n\n"}]
            joined = [*first, *separator, *second]
            texts = [part["text"] for part in joined if part["type"] == "text"]
            content = "".join(texts) if len(texts) == len(joined) else joined
            self.chat[:2] = [{"role": "system", "content": content}]
            del self.places[1]

    def _add_message(self, item: InputItem, place: str) -> None:
        if item.role is None:
            raise _missing(f"{place}.role")
        if item.content is None:
            raise _missing(f"{place}.content")
        content = (
            item.content if isinstance(item.content, str) else _content(item.content, f"{place}.content")
        )
        if item.role != "assistant":
            self.add({"role": item.role, "content": content}, place)
            return
        message = self._assistant(place)
        if message["content"]:
            content = [*_parts(message["content"]), *_parts(content)]
        message["content"] = content

    def _add_call(self, call_id: str, name: str, arguments: str, place: str) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant(place).setdefault("tool_calls", []).append(call)

    def _add_reasoning(self, item: InputItem, place: str) -> None:
        text = _reasoning(item, place)
        if text:
            message = self._assistant(place)
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def _assistant(self, place: str) -> dict[str, Any]:
        """Return the assistant message that the next item of the model's output belongs to."""
        if not self.chat or self.chat[-1]["role"] != "assistant":
            self.add({"role": "assistant", "content": ""}, place)
        return self.chat[-1]


def _reasoning(item: InputItem, place: str) -> str:
    parts = item.content if isinstance(item.content, list) else None
    if parts:
        return "".join(part.text or "" for part in parts)
    if isinstance(item.content, str):
        return item.content
    if item.encrypted_content is not None:
        try:
            data = base64.urlsafe_b64decode(item.encrypted_content)
        except (binascii.Error, ValueError):
            data = b""
        if not data.startswith(_REASONING_PREFIX):
            raise RequestProblem(
                400,
                f"{place}.encrypted_content is from another server: omit the reasoning item",
                param=f"{place}.encrypted_content",
            )
        return data.removeprefix(_REASONING_PREFIX).decode(errors="replace")
    return "\n\n".join(part.text or "" for part in item.summary or ())


def _content(parts: Sequence[InputPart], place: str) -> Any:
    """Return the content of a message; one text part becomes plain text."""
    chat = [_part(part, f"{place}[{index}]") for index, part in enumerate(parts)]
    if len(chat) == 1 and chat[0]["type"] == "text":
        return chat[0]["text"]
    return chat


def _part(part: InputPart, place: str) -> dict[str, Any]:
    match part.type:
        case "input_text" | "output_text" | "text":
            if part.text is None:
                raise _missing(f"{place}.text")
            return {"type": "text", "text": part.text}
        case "refusal":
            return {"type": "refusal", "refusal": part.refusal or ""}
        case "input_image":
            if part.image_url is None:
                raise _missing(f"{place}.image_url")
            detail = {} if part.detail is None else {"detail": part.detail}
            return {"type": "image_url", "image_url": {"url": part.image_url, **detail}}
    raise RequestProblem(
        400,
        f"{place} has the type {part.type!r}, which is not supported: send input_text",
        param=f"{place}.type",
        code="unsupported_value",
    )


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _tools(body: ResponsesBody, hosted_tools: str) -> tuple[list[dict[str, Any]], list[str]]:
    tools: list[dict[str, Any]] = []
    places: list[str] = []
    for index, tool in enumerate(body.tools or ()):
        place = f"tools[{index}]"
        if tool.is_hosted:
            if hosted_tools == "refuse":
                raise RequestProblem(
                    400,
                    f"{place} is the hosted tool {tool.type!r}, and this server has none: send function "
                    "tools (--hosted-tools skip omits hosted tools)",
                    param=f"{place}.type",
                    code="unsupported_value",
                )
            continue
        if tool.name is None:
            raise _missing(f"{place}.name")
        tools.append({"type": "function", "function": _function(tool)})
        places.append(place)
    return tools, places


def _function(tool: ResponseTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.type == "function":
        return function | {"parameters": tool.parameters, "strict": tool.strict}
    # A chat template has only functions, so a custom tool is a function with one text.
    about = {"type": "string"}
    form = tool.format or {}
    if form.get("type") == "grammar":
        about["description"] = f"Text of this {form.get('syntax')} grammar:\n{form.get('definition')}"
    parameters = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: about},
        "required": [CUSTOM_ARGUMENT],
        "additionalProperties": False,
    }
    return function | {"parameters": parameters}


def hosted_tools_of(body: ResponsesBody) -> list[str]:
    """Return the types of the hosted tools of a request."""
    return sorted({tool.type for tool in body.tools or () if tool.is_hosted})


def custom_tools_of(body: ResponsesBody) -> frozenset[str]:
    """Return the names of the custom tools of a request."""
    return frozenset(tool.name or "" for tool in body.tools or () if tool.type == "custom")


def _choice(body: ResponsesBody) -> dict[str, Any]:
    choice = body.tool_choice
    if not isinstance(choice, ToolSelection):
        return {} if choice is None else {"tool_choice": choice}
    match choice.type:
        case "function" | "custom":
            if choice.name is None:
                raise _missing("tool_choice.name")
            return {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
        case "allowed_tools":
            return {"tool_choice": {"type": "allowed_tools", "allowed_tools": _allowed(choice)}}
    raise _hosted_choice("tool_choice.type", choice.type)


def _allowed(choice: ToolSelection) -> dict[str, Any]:
    if choice.mode is None:
        raise _missing("tool_choice.mode")
    if choice.tools is None:
        raise _missing("tool_choice.tools")
    allowed = []
    for index, tool in enumerate(choice.tools):
        place = f"tool_choice.tools[{index}]"
        if tool.get("type") not in ("function", "custom"):
            raise _hosted_choice(f"{place}.type", tool.get("type"))
        if not isinstance(tool.get("name"), str):
            raise _missing(f"{place}.name")
        allowed.append({"type": "function", "function": {"name": tool["name"]}})
    return {"mode": choice.mode, "tools": allowed}


def _hosted_choice(place: str, kind: Any) -> RequestProblem:
    return RequestProblem(
        400,
        f"{place} is {str(kind)[:100]!r}, a hosted tool, and this server has none: choose a function",
        param=place,
        code="unsupported_value",
    )


def _format(body: ResponsesBody) -> dict[str, Any]:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    if form.schema_ is None:
        raise _missing("text.format.schema")
    schema = {"name": form.name or "output", "schema": form.schema_}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _text(item: InputItem, name: str, place: str) -> str:
    value = getattr(item, name)
    if value is None:
        raise _missing(f"{place}.{name}")
    assert isinstance(value, str)
    return value


def _missing(place: str) -> RequestProblem:
    return RequestProblem(400, f"{place} is required", param=place, code="missing_required_parameter")
