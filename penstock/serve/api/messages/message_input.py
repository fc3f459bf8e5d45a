"""Translates Messages requests to chat requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

from penstock.serve.api.chat_prompt import template_supports_effort
from penstock.serve.api.messages.message_schema import (
    FIELDS_SHARED_WITH_CHAT,
    CountTokensBody,
    MessageBlock,
    MessagesBody,
    ResultBlock,
)
from penstock.serve.api.translation import Translation
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services

T = TypeVar("T")

CLIENT_FIELD_NAMES: Mapping[str, str] = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format.json_schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "tool_choice.function.name": "tool_choice.name",
    "tools.parameters": "input_schema",
}
"""Field of a chat request -> field of a Messages request, for error messages."""


def chat_request(services: Services, body: CountTokensBody) -> tuple[Translation, list[str]]:
    """Translate a Messages request to a chat request.

    Returns:
        The translation, and a description of each hosted tool and setting that is ignored.

    Raises:
        RequestProblem: 400; the message names the invalid field.
    """
    messages = _ChatMessages()
    if body.system:
        messages.add({"role": "system", "content": _message_content(body.system, "system")}, "system")
    for index, message in enumerate(body.messages):
        field_path = f"messages[{index}]"
        if isinstance(message.content, str):
            messages.add({"role": message.role, "content": message.content}, field_path)
        elif message.role == "assistant":
            messages.add(_assistant_message(message.content, field_path), field_path)
        else:
            messages.add_blocks(message.role, message.content, field_path)
    tools, tool_paths, warnings = _chat_tools(services, body)
    reasoning, ignored_settings = _reasoning_settings(services, body)
    chat: dict[str, object] = {
        "model": body.model,
        "messages": messages.chat_messages,
        **_tool_choice_fields(body),
        **reasoning,
    }
    if tools:
        chat["tools"] = tools
    output_format = body.output_config.format if body.output_config is not None else None
    if output_format is not None:
        schema = {"name": "output", "schema": output_format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    last = messages.chat_messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):  # the output continues the last message
        chat["continue_final_message"] = True
    if isinstance(body, MessagesBody):
        chat |= _sampling_fields(body, chat)
    return Translation(
        chat, messages.field_paths, tool_paths, CLIENT_FIELD_NAMES
    ), warnings + ignored_settings


class _ChatMessages:
    """The messages of a chat request, and the field of the Messages request that each message comes from."""

    def __init__(self) -> None:
        self.chat_messages: list[dict[str, object]] = []
        self.field_paths: list[str] = []

    def add(self, message: dict[str, object], field_path: str) -> None:
        self.chat_messages.append(message)
        self.field_paths.append(field_path)

    def add_blocks(self, role: str, blocks: Sequence[MessageBlock], field_path: str) -> None:
        """Translate the blocks of one Messages message and add the resulting chat messages.

        Each tool result becomes one chat message. Consecutive blocks of other types become one chat message.
        An empty list becomes an empty chat message.
        """
        content_blocks: list[MessageBlock] = []

        def flush() -> None:
            if content_blocks:
                self.add(
                    {"role": role, "content": _message_content(content_blocks, f"{field_path}.content")},
                    field_path,
                )
                content_blocks.clear()

        for index, block in enumerate(blocks):
            if block.type == "tool_result":
                flush()
                self.add(_tool_message(block, f"{field_path}.content[{index}]"), field_path)
            else:
                content_blocks.append(block)
        flush()
        if not blocks:
            self.add({"role": role, "content": ""}, field_path)


def _assistant_message(blocks: Sequence[MessageBlock], field_path: str) -> dict[str, object]:
    texts, reasoning_texts, calls = [], [], []
    for index, block in enumerate(blocks):
        block_path = f"{field_path}.content[{index}]"
        match block.type:
            case "text":
                texts.append(_required_value(block.text, f"{block_path}.text"))
            case "thinking":
                reasoning_texts.append(_required_value(block.thinking, f"{block_path}.thinking"))
            case "redacted_thinking":
                continue
            case "tool_use":
                arguments = json.dumps(
                    _required_value(block.input, f"{block_path}.input"), ensure_ascii=False
                )
                function = {"name": _required_value(block.name, f"{block_path}.name"), "arguments": arguments}
                calls.append(
                    {
                        "id": _required_value(block.id, f"{block_path}.id"),
                        "type": "function",
                        "function": function,
                    }
                )
            case block_type:
                raise _unsupported_type(block_type, block_path, "text, thinking or tool_use")
    message: dict[str, object] = {"role": "assistant", "content": "".join(texts)}
    if reasoning_texts:
        message["reasoning_content"] = "".join(reasoning_texts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_message(block: MessageBlock, field_path: str) -> dict[str, object]:
    content = "" if block.content is None else _message_content(block.content, f"{field_path}.content")
    if block.is_error:  # chat templates cannot mark errors
        content = f"Error: {content}" if isinstance(content, str) else [_text_part("Error: "), *content]
    return {
        "role": "tool",
        "tool_call_id": _required_value(block.tool_use_id, f"{field_path}.tool_use_id"),
        "content": content,
    }


def _message_content(content: str | Sequence[ResultBlock], field_path: str) -> str | list[dict[str, object]]:
    """Return the content of a chat message. A list with a single text part becomes a string."""
    if isinstance(content, str):
        return content
    parts = [_content_part(block, f"{field_path}[{index}]") for index, block in enumerate(content)]
    text = parts[0].get("text") if len(parts) == 1 else None
    return text if isinstance(text, str) else parts


def _content_part(block: ResultBlock, field_path: str) -> dict[str, object]:
    source = block.source
    match block.type:
        case "text":
            return _text_part(_required_value(block.text, f"{field_path}.text"))
        case "image" if source is not None and source.type == "url":
            return {
                "type": "image_url",
                "image_url": {"url": _required_value(source.url, f"{field_path}.source.url")},
            }
        case "image" if source is not None and source.type == "base64":
            data = _required_value(source.data, f"{field_path}.source.data")
            media_type = _required_value(source.media_type, f"{field_path}.source.media_type")
            return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
        case "document" if source is not None and source.type == "text":
            data = _required_value(source.data, f"{field_path}.source.data")
            return _text_part(f"{block.title}\n\n{data}" if block.title else data)
        case "tool_reference":  # the result of a client's tool search; the prompt contains all tools anyway
            return _text_part(
                f"The tool {_required_value(block.tool_name, f'{field_path}.tool_name')} is available."
            )
        case "image" | "document":
            source_type = None if source is None else source.type
            raise RequestProblem(
                400,
                f"{field_path}.source has the type {source_type!r}, which the server does not support in "
                f"blocks of type {block.type}",
                param=f"{field_path}.source",
                code="unsupported_value",
            )
    raise _unsupported_type(block.type, field_path, "text, image, document, tool_reference or tool_result")


def _text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def _chat_tools(
    services: Services, body: CountTokensBody
) -> tuple[list[dict[str, object]], list[str], list[str]]:
    """Return the tools of the chat request, their field paths, and a description of each skipped hosted tool.

    Raises:
        RequestProblem: 400; a tool of the client has no ``input_schema``, or a tool is hosted and
            ``--hosted-tools`` is ``refuse``.
    """
    tools: list[dict[str, object]] = []
    field_paths, skipped_tools = [], []
    for index, tool in enumerate(body.tools or ()):
        field_path = f"tools[{index}]"
        if tool.is_hosted:
            if services.config.hosted_tools == "refuse":
                raise RequestProblem(
                    400,
                    f"{field_path} is the hosted tool {tool.type!r}, and this server has no hosted tools "
                    "(--hosted-tools skip omits hosted tools)",
                    param=f"{field_path}.type",
                    code="unsupported_value",
                )
            skipped_tools.append(f"the hosted tool {tool.type}, which the server does not have")
            continue
        schema = _required_value(tool.input_schema, f"{field_path}.input_schema")
        function = {"name": tool.name, "description": tool.description, "parameters": schema}
        tools.append({"type": "function", "function": {**function, "strict": tool.strict}})
        field_paths.append(field_path)
    return tools, field_paths, skipped_tools


def _tool_choice_fields(body: CountTokensBody) -> dict[str, object]:
    choice = body.tool_choice
    if choice is None:
        return {}
    parallel_field = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        name = _required_value(choice.name, "tool_choice.name")
        hosted_type = next(
            (tool.type for tool in body.tools or () if tool.is_hosted and tool.name == name), None
        )
        if hosted_type is not None:
            raise RequestProblem(
                400,
                f"tool_choice.name is {name!r}, the hosted tool {hosted_type!r}, and this server has no "
                "hosted tools",
                param="tool_choice.name",
                code="unsupported_value",
            )
        return {"tool_choice": {"type": "function", "function": {"name": name}}, **parallel_field}
    return {"tool_choice": {"any": "required"}.get(choice.type, choice.type), **parallel_field}


def _reasoning_settings(services: Services, body: CountTokensBody) -> tuple[dict[str, object], list[str]]:
    """Return the reasoning fields of the chat request, and a description of each setting without effect."""
    settings: dict[str, object] = {}
    ignored_settings = []
    thinking, config = body.thinking, body.output_config
    if thinking is not None:
        is_on = thinking.type != "disabled"
        if services.tokenizer.template_mentions("enable_thinking"):
            settings["chat_template_kwargs"] = {"enable_thinking": is_on}
        elif is_on and services.parsers.reasoning_format_name is None:
            ignored_settings.append("thinking, which the model does not support")
    if config is not None and config.effort is not None:
        if template_supports_effort(services.tokenizer, config.effort):
            settings["reasoning_effort"] = config.effort
        else:
            ignored_settings.append("output_config.effort, which the chat template does not use")
    return settings, ignored_settings


def _sampling_fields(body: MessagesBody, chat: Mapping[str, object]) -> dict[str, object]:
    fields = {
        name: getattr(body, name) for name in FIELDS_SHARED_WITH_CHAT if getattr(body, name) is not None
    }
    thinking_options = chat.get("chat_template_kwargs")
    options = {
        **(thinking_options if isinstance(thinking_options, dict) else {}),
        **fields.get("chat_template_kwargs", {}),
    }
    if options:
        fields["chat_template_kwargs"] = options
    if body.stop_sequences:
        fields["stop"] = body.stop_sequences
    if body.metadata is not None and body.metadata.user_id is not None:
        fields["user"] = body.metadata.user_id
    return {**fields, "max_completion_tokens": body.max_tokens}


def _required_value(value: T | None, field_path: str) -> T:
    if value is None:
        raise RequestProblem(
            400, f"{field_path} is required", param=field_path, code="missing_required_parameter"
        )
    return value


def _unsupported_type(block_type: str, field_path: str, supported_types: str) -> RequestProblem:
    return RequestProblem(
        400,
        f"{field_path} has the type {block_type[:100]!r}, which is not supported: send {supported_types}",
        param=f"{field_path}.type",
        code="unsupported_value",
    )
