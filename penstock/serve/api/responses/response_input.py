"""Translates Responses requests to chat requests."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Required, TypedDict

from penstock.serve.api.responses.offered_tools import OfferedTools
from penstock.serve.api.responses.response_schema import (
    FIELDS_SHARED_WITH_CHAT,
    INCLUDE_LOGPROBS,
    InputItem,
    InputPart,
    ResponsesBody,
)
from penstock.serve.api.responses.tool_input import (
    CUSTOM_ARGUMENT,
    chat_tool_choice,
    chat_tools,
    missing_field_error,
)
from penstock.serve.api.translation import Translation
from penstock.serve.http.problems import RequestProblem
from penstock.serve.mcp.tool_session import ToolOutput
from penstock.serve.services import Services

CLIENT_FIELD_NAMES: Mapping[str, str] = {
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
"""Field of a chat request -> field of a Responses request, for error messages."""

_REASONING_PREFIX = b"penstock1:"


def chat_request(
    services: Services,
    body: ResponsesBody,
    history: Sequence[InputItem],
    offered_tools: OfferedTools,
    *,
    hosted_tools: str,
) -> Translation:
    """Translate a Responses request to a chat request.

    Args:
        services: the objects that routes use.
        body: the request.
        history: the input items and output items of the previous response.
        offered_tools: the tools of tool servers.
        hosted_tools: ``skip`` leaves out hosted tools, ``refuse`` refuses a request with hosted tools.

    Raises:
        RequestProblem: 400; the message names the invalid field.
    """
    tools, tool_paths = chat_tools(body, offered_tools, hosted_tools)
    messages = ChatMessages(offered_tools)
    if body.instructions:
        messages.add({"role": "system", "content": body.instructions}, "instructions")
    for item in history:
        messages.add_item(item, "previous_response_id")
    if isinstance(body.input, str):
        messages.add({"role": "user", "content": body.input}, "input")
    else:
        for index, item in enumerate(body.input):
            messages.add_item(item, f"input[{index}]")
    if not messages.chat_messages:
        raise RequestProblem(400, "input is an empty list", param="input")
    messages.merge_instructions(services.tokenizer.template_mentions("developer"))
    chat = {name: getattr(body, name) for name in FIELDS_SHARED_WITH_CHAT if getattr(body, name) is not None}
    chat |= {
        "messages": messages.chat_messages,
        **_response_format(body),
        **chat_tool_choice(body, offered_tools),
    }
    if tools:
        chat["tools"] = tools
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.includes(INCLUDE_LOGPROBS):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return Translation(chat, messages.field_paths, tool_paths, CLIENT_FIELD_NAMES)


def encoded_reasoning(text: str) -> str:
    """Return the ``encrypted_content`` of a reasoning item: base64 of a prefix and the plain text."""
    return base64.urlsafe_b64encode(_REASONING_PREFIX + text.encode()).decode()


class AssembledMessage(TypedDict, total=False):
    """A message of the chat request. It may consist of several items of the Responses API."""

    role: Required[str]
    content: Required[str | list[dict[str, object]]]
    tool_calls: list[dict[str, object]]
    tool_call_id: str
    reasoning_content: str


class ChatMessages:
    """Builds the messages of a chat request from items of the Responses API.

    Args:
        offered_tools: the tools of tool servers.
    """

    def __init__(self, offered_tools: OfferedTools) -> None:
        self._offered_tools = offered_tools
        self._approval_requests: dict[str | None, InputItem] = {}
        self.chat_messages: list[AssembledMessage] = []
        self.field_paths: list[str] = []
        """The request field of the first item of each message, such as ``input[2]``."""

    def add(self, message: AssembledMessage, field_path: str) -> None:
        """Add a message."""
        self.chat_messages.append(message)
        self.field_paths.append(field_path)

    def add_item(self, item: InputItem, field_path: str) -> None:
        """Add an input item.

        Raises:
            RequestProblem: 400; the item is invalid, or its type is not supported.
        """
        match item.type or "message":
            case "message":
                self._add_message(item, field_path)
            case "function_call":
                name, arguments = (
                    _required_text(item, "name", field_path),
                    _required_text(item, "arguments", field_path),
                )
                self._add_call(_required_text(item, "call_id", field_path), name, arguments, field_path)
            case "custom_tool_call":
                arguments = json.dumps(
                    {CUSTOM_ARGUMENT: _required_text(item, "input", field_path)}, ensure_ascii=False
                )
                self._add_call(
                    _required_text(item, "call_id", field_path),
                    _required_text(item, "name", field_path),
                    arguments,
                    field_path,
                )
            case "function_call_output" | "custom_tool_call_output":
                output = item.output
                if output is None:
                    raise missing_field_error(f"{field_path}.output")
                content = (
                    output if isinstance(output, str) else _message_content(output, f"{field_path}.output")
                )
                call_id = _required_text(item, "call_id", field_path)
                self.add({"role": "tool", "tool_call_id": call_id, "content": content}, field_path)
            case "reasoning":
                self._add_reasoning(item, field_path)
            case "mcp_list_tools":
                pass  # the chat template already renders the tools of the request
            case "mcp_call":
                self._add_mcp_call(item, _mcp_output(item), field_path)
            case "mcp_approval_request":
                self._approval_requests[item.id] = item
            case "mcp_approval_response":
                self._add_approval(item, field_path)
            case item_type:
                raise RequestProblem(
                    400,
                    f"{field_path} has the type {item_type!r}, which is not supported: send message, "
                    "function_call, function_call_output, custom_tool_call, custom_tool_call_output, "
                    "reasoning, item_reference, mcp_list_tools, mcp_call, mcp_approval_request or "
                    "mcp_approval_response",
                    param=f"{field_path}.type",
                    code="unsupported_value",
                )

    def merge_instructions(self, has_developer_role: bool) -> None:
        """Merge the leading system messages into one, because many chat templates allow only one.

        If the chat template has no role ``developer``, developer messages count as system messages.
        """
        roles = ("system",) if has_developer_role else ("system", "developer")
        while len(self.chat_messages) > 1 and all(
            message["role"] in roles for message in self.chat_messages[:2]
        ):
            first, second = (_content_parts(message["content"]) for message in self.chat_messages[:2])
            all_parts: list[dict[str, object]] = [*first, {"type": "text", "text": "\n\n"}, *second]
            texts = [str(part["text"]) for part in all_parts if part["type"] == "text"]
            is_text = len(texts) == len(all_parts)
            self.chat_messages[:2] = [{"role": "system", "content": "".join(texts) if is_text else all_parts}]
            del self.field_paths[1]

    def _add_message(self, item: InputItem, field_path: str) -> None:
        if item.role is None:
            raise missing_field_error(f"{field_path}.role")
        if item.content is None:
            raise missing_field_error(f"{field_path}.content")
        content = (
            item.content
            if isinstance(item.content, str)
            else _message_content(item.content, f"{field_path}.content")
        )
        if item.role != "assistant":
            self.add({"role": item.role, "content": content}, field_path)
            return
        message = self._last_assistant_message(field_path)
        if message["content"]:
            content = [*_content_parts(message["content"]), *_content_parts(content)]
        message["content"] = content

    def _add_call(self, call_id: str, name: str, arguments: str, field_path: str) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._last_assistant_message(field_path).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _add_mcp_call(self, item: InputItem, output: str, field_path: str) -> None:
        """Add a call to a tool server to the conversation, and a message with its output."""
        name = self._offered_tools.function_name(
            _required_text(item, "server_label", field_path), _required_text(item, "name", field_path)
        )
        call_id = _required_text(item, "id", field_path)
        self._add_call(call_id, name, _required_text(item, "arguments", field_path) or "{}", field_path)
        self.add({"role": "tool", "tool_call_id": call_id, "content": output}, field_path)

    def _add_approval(self, item: InputItem, field_path: str) -> None:
        """Add a tool call that the client has rejected. `ResponseRun` makes and adds approved calls."""
        approval_request_id = _required_text(item, "approval_request_id", field_path)
        if item.approve is None:
            raise missing_field_error(f"{field_path}.approve")
        request = self._approval_requests.get(approval_request_id)
        if request is None:
            raise RequestProblem(
                400,
                f"{field_path}.approval_request_id is {approval_request_id[:100]!r}, but no earlier item has "
                "this id: send the mcp_approval_request, or previous_response_id",
                param=f"{field_path}.approval_request_id",
            )
        if not item.approve:
            reason_text = f": {item.reason}" if item.reason else ""
            self._add_mcp_call(
                request, f"Error: the user has not approved this call{reason_text}", field_path
            )

    def _add_reasoning(self, item: InputItem, field_path: str) -> None:
        text = _reasoning_text(item, field_path)
        if text:
            message = self._last_assistant_message(field_path)
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def _last_assistant_message(self, field_path: str) -> AssembledMessage:
        """Return the last message if its role is ``assistant``. Otherwise add and return a new one."""
        if not self.chat_messages or self.chat_messages[-1]["role"] != "assistant":
            self.add({"role": "assistant", "content": ""}, field_path)
        return self.chat_messages[-1]


def _reasoning_text(item: InputItem, field_path: str) -> str:
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
                f"{field_path}.encrypted_content is not from this server: omit the reasoning item",
                param=f"{field_path}.encrypted_content",
            )
        return data.removeprefix(_REASONING_PREFIX).decode(errors="replace")
    return "\n\n".join(part.text or "" for part in item.summary or ())


def _mcp_output(item: InputItem) -> str:
    """Return the text that the prompt contains as the output of a call to a tool server."""
    if isinstance(item.error, dict):
        return ToolOutput(error=item.error).text
    if item.error is not None:
        return f"Error: {item.error}"
    return item.output if isinstance(item.output, str) else "Error: the call did not run"


def _message_content(parts: Sequence[InputPart], field_path: str) -> str | list[dict[str, object]]:
    """Return the content of a chat message. A single text part becomes a string."""
    chat_parts = [_content_part(part, f"{field_path}[{index}]") for index, part in enumerate(parts)]
    text = chat_parts[0].get("text") if len(chat_parts) == 1 else None
    return text if isinstance(text, str) else chat_parts


def _content_part(part: InputPart, field_path: str) -> dict[str, object]:
    match part.type:
        case "input_text" | "output_text" | "text":
            if part.text is None:
                raise missing_field_error(f"{field_path}.text")
            return {"type": "text", "text": part.text}
        case "refusal":
            return {"type": "refusal", "refusal": part.refusal or ""}
        case "input_image":
            if part.image_url is None:
                raise missing_field_error(f"{field_path}.image_url")
            detail = {} if part.detail is None else {"detail": part.detail}
            return {"type": "image_url", "image_url": {"url": part.image_url, **detail}}
    raise RequestProblem(
        400,
        f"{field_path} has the type {part.type!r}, which is not supported: send input_text or input_image",
        param=f"{field_path}.type",
        code="unsupported_value",
    )


def _content_parts(content: str | list[dict[str, object]]) -> list[dict[str, object]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _response_format(body: ResponsesBody) -> dict[str, object]:
    text_format = body.text.format if body.text is not None else None
    if text_format is None or text_format.type == "text":
        return {}
    if text_format.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    if text_format.schema_ is None:
        raise missing_field_error("text.format.schema")
    schema = {"name": text_format.name or "output", "schema": text_format.schema_}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _required_text(item: InputItem, name: str, field_path: str) -> str:
    value = getattr(item, name)
    if value is None:
        raise missing_field_error(f"{field_path}.{name}")
    assert isinstance(value, str)
    return value
