"""Prepares messages, tools and variables for the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict, cast

from penstock.pipelines.core import (
    TokenGeneratorRequestFunction,
    TokenGeneratorRequestMessage,
    TokenGeneratorRequestTool,
)
from penstock.serve.api.schemas import AllowedTools, ChatBody, NamedTool, TokenizeBody
from penstock.serve.http.problems import RequestProblem
from penstock.serve.parsers.tools import NamedFunction
from penstock.text.chat_template import RESERVED_OPTIONS, Message
from penstock.text.tokenizer import TextTokenizer

ChatLike = ChatBody | TokenizeBody


@dataclass(frozen=True)
class ToolUse:
    """The tools in the prompt, and the constraint on the output that ``tool_choice`` sets."""

    tools: list[TokenGeneratorRequestTool]
    choice: str | NamedFunction
    """OpenAI's ``tool_choice``: ``auto``, ``none``, ``required``, or an object that names a function."""
    strict_names: frozenset[str] = frozenset()
    """Names of the tools with ``strict: true``. Empty if `choice` names a function or is ``none``."""

    @property
    def is_forced(self) -> bool:
        """Whether the output must be a tool call."""
        return self.choice not in ("auto", "none")

    @property
    def callable_names(self) -> frozenset[str]:
        """Names of the tools that the model may call."""
        if isinstance(self.choice, dict):
            return frozenset({self.choice["function"]["name"]})
        return frozenset(tool["function"]["name"] for tool in self.tools)


def raw_messages(raw: Mapping[str, object]) -> list[Message]:
    """Return the messages of a validated chat request as the client sent them."""
    messages = raw["messages"]
    assert isinstance(messages, list)
    return messages


def template_tools(raw: Mapping[str, object]) -> list[TokenGeneratorRequestTool]:
    """Return the tools of a validated request, without ``strict`` and null members of their functions.

    A tool without ``parameters`` gets the schema of an object without properties.
    """
    tools = raw.get("tools")
    return [_template_tool(tool) for tool in tools] if isinstance(tools, list) else []


def requested_tool_use(body: ChatBody, raw: Mapping[str, object]) -> ToolUse:
    """Return the tools in the prompt and the tool choice of a request.

    Raises:
        RequestProblem: 400; ``tool_choice`` names a tool that the request does not have, or is ``required``
            although there are no tools.
    """
    tools = template_tools(raw)
    names = [tool["function"]["name"] for tool in tools]
    choice = body.tool_choice
    strict_names = frozenset(tool.function.name for tool in body.tools or () if tool.function.strict)
    match choice:
        case NamedTool():
            _check_name(choice.function.name, names, "tool_choice.function.name")
            return ToolUse(tools, {"type": "function", "function": {"name": choice.function.name}})
        case AllowedTools():
            allowed_names = [tool.function.name for tool in choice.allowed_tools.tools]
            for index, name in enumerate(allowed_names):
                _check_name(name, names, f"tool_choice.allowed_tools.tools[{index}].function.name")
            allowed_tools = [tool for tool in tools if tool["function"]["name"] in allowed_names]
            if choice.allowed_tools.mode == "required" and not allowed_tools:
                raise RequestProblem(
                    400,
                    "tool_choice.allowed_tools has the mode 'required', but no tools",
                    param="tool_choice",
                )
            return ToolUse(
                allowed_tools,
                choice.allowed_tools.mode if allowed_tools else "none",
                strict_names & {*allowed_names},
            )
        case "required" if not tools:
            raise RequestProblem(
                400, "tool_choice is 'required', but there are no tools", param="tool_choice"
            )
        case "none":
            return ToolUse([], "none")  # the prompt omits tools that must not be called
    return ToolUse(tools, choice or ("auto" if tools else "none"), strict_names)


def check_template_reads_tools(tools: Sequence[Mapping[str, object]], tokenizer: TextTokenizer) -> None:
    """Raise if a request has tools, but the chat template omits tools from the prompt.

    Raises:
        RequestProblem: 400; the template does not contain the word ``tools``.
    """
    if tools and tokenizer.has_chat_template and not tokenizer.template_mentions("tools"):
        raise RequestProblem(
            400,
            "tools are not supported: the model's chat template omits them. Start the server with another "
            "--chat-template",
            param="tools",
            code="unsupported_parameter",
        )


def template_messages(
    messages: Sequence[Message], tokenizer: TextTokenizer
) -> list[TokenGeneratorRequestMessage]:
    """Return the messages in the format that chat templates of Hugging Face transformers read.

    Null and unknown members of messages are removed. If the template does not contain the word ``developer``,
    the role ``developer`` becomes ``system``.
    """
    has_developer_role = tokenizer.template_mentions("developer")
    needs_argument_objects = tokenizer.template_takes_argument_objects
    converted_messages = [
        _template_message(message, has_developer_role, needs_argument_objects, tokenizer.reads_images)
        for message in messages
    ]
    if tokenizer.template_mentions("thinking") and not tokenizer.template_mentions("reasoning_content"):
        for message in converted_messages:  # the template of gpt-oss names the field "thinking"
            if "reasoning_content" in message:
                message["thinking"] = message.pop("reasoning_content")
    return cast("list[TokenGeneratorRequestMessage]", converted_messages)


def template_options(body: ChatLike, tokenizer: TextTokenizer, *, can_reason: bool) -> dict[str, object]:
    """Return the variables of the chat template that the request sets.

    Members of ``chat_template_kwargs`` that the template does not read have no effect, as in transformers.
    They are not refused, because some clients send the same variables to every model.

    Args:
        body: the validated request body.
        tokenizer: the tokenizer with the chat template.
        can_reason: whether the model has a reasoning format. If False, ``reasoning_effort: none`` is
            accepted with every template.

    Raises:
        RequestProblem: 400; ``chat_template_kwargs`` has a reserved name, or the template does not support
            the requested ``reasoning_effort``.
    """
    options = dict(body.chat_template_kwargs or {})
    for name in sorted(RESERVED_OPTIONS & options.keys()):
        raise RequestProblem(
            400,
            f"chat_template_kwargs cannot set {name}: this name is reserved",
            param=f"chat_template_kwargs.{name}",
            code="unsupported_parameter",
        )
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message is not None:
        options["continue_final_message"] = body.continue_final_message
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    if effort is None:
        return options
    if tokenizer.template_mentions("reasoning_effort"):
        options["reasoning_effort"] = effort
    elif effort == "none" and tokenizer.template_mentions("enable_thinking"):
        options["enable_thinking"] = False
    elif effort != "none" or can_reason:
        raise RequestProblem(
            400,
            f"reasoning_effort {effort!r} is not supported: the model's chat template does not use it",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return options


def template_supports_effort(tokenizer: TextTokenizer, effort: str) -> bool:
    """Return whether the chat template can apply a ``reasoning_effort``."""
    return tokenizer.template_mentions("reasoning_effort") or (
        effort == "none" and tokenizer.template_mentions("enable_thinking")
    )


def _template_tool(tool: TokenGeneratorRequestTool) -> TokenGeneratorRequestTool:
    function = {
        key: value for key, value in tool["function"].items() if value is not None and key != "strict"
    }
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": tool["type"], "function": cast("TokenGeneratorRequestFunction", function)}


def _check_name(name: str, names: Sequence[str], param: str) -> None:
    if name not in names:
        names_text = ", ".join(names) or "none"
        raise RequestProblem(
            400, f"{param} is {name!r}, which is not one of the tools: {names_text}", param=param
        )


def _template_message(
    message: Message, has_developer_role: bool, needs_argument_objects: bool, reads_images: bool
) -> dict[str, object]:
    template_message = {
        key: value for key, value in message.items() if value is not None and key in _MESSAGE_FIELDS
    }
    if template_message["role"] == "developer" and not has_developer_role:
        template_message["role"] = "system"
    if message.get("reasoning") is not None:
        template_message.setdefault("reasoning_content", message["reasoning"])
    content = template_message.get("content")
    if isinstance(content, list):
        template_message["content"] = [_template_part(part, reads_images) for part in content] or ""
    elif content is None:
        template_message["content"] = message.get("refusal") or ""
    calls = template_message.get("tool_calls")
    if isinstance(calls, list) and calls:
        template_message["tool_calls"] = [_template_call(call, needs_argument_objects) for call in calls]
    else:
        template_message.pop("tool_calls", None)
    return template_message


_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def _template_part(part: Mapping[str, object], reads_images: bool) -> dict[str, object]:
    if part["type"] == "image_url" and reads_images:
        return {"type": "image"}
    if part["type"] == "refusal":
        return {"type": "text", "text": part["refusal"]}
    return {key: value for key, value in part.items() if value is not None}


class _CalledFunction(TypedDict):
    name: str
    arguments: NotRequired[object]


class _EarlierToolCall(TypedDict):
    """A tool call in an earlier message of the conversation."""

    id: NotRequired[str | None]
    function: _CalledFunction


def _template_call(call: _EarlierToolCall, needs_argument_objects: bool) -> dict[str, object]:
    arguments = call["function"].get("arguments")
    if needs_argument_objects:
        arguments = _parsed_arguments(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    id_field = {"id": call["id"]} if call.get("id") is not None else {}
    return {
        **id_field,
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": arguments},
    }


def _parsed_arguments(arguments: object) -> object:
    """Return the arguments of a tool call as an object. A text is parsed as JSON.

    Null or an empty text becomes an empty object. A text that is not a JSON object is returned unchanged.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
