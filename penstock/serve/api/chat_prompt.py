"""A chat's prompt: messages and tools as the model's template wants them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.serve.api.schemas import AllowedTools, ChatBody, NamedTool, TokenizeBody
from penstock.serve.http.problems import RequestProblem
from penstock.text.tokenizer import TextTokenizer

ChatLike = ChatBody | TokenizeBody


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call, and whether it has to."""

    tools: list[dict[str, Any]]
    choice: str | dict[str, Any]
    """``auto``, ``none``, ``required``, or the one function to call, as OpenAI writes it."""
    strict: frozenset[str] = frozenset()
    """Names of the tools whose arguments have to be as their schemas say."""

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice not in ("auto", "none")

    @property
    def called(self) -> frozenset[str]:
        """Names of the tools that a forced call may be of."""
        if isinstance(self.choice, dict):
            return frozenset({self.choice["function"]["name"]})
        return frozenset(tool["function"]["name"] for tool in self.tools)


def tool_use(body: ChatBody, raw: Mapping[str, Any]) -> ToolUse:
    """The tools of a request.

    Raises:
        RequestProblem: 400; ``tool_choice`` asks for a tool that is not there.
    """
    tools = [plain_tool(tool) for tool in raw.get("tools") or []]
    names = [tool["function"]["name"] for tool in tools]
    choice = body.tool_choice
    strict = frozenset(tool.function.name for tool in body.tools or () if tool.function.strict)
    match choice:
        case NamedTool():
            _check_name(choice.function.name, names, "tool_choice.function.name")
            return ToolUse(tools, {"type": "function", "function": {"name": choice.function.name}})
        case AllowedTools():
            allowed = [tool.function.name for tool in choice.allowed_tools.tools]
            for index, name in enumerate(allowed):
                _check_name(name, names, f"tool_choice.allowed_tools.tools[{index}].function.name")
            kept = [tool for tool in tools if tool["function"]["name"] in allowed]
            return ToolUse(kept, choice.allowed_tools.mode if kept else "none", strict & {*allowed})
        case "required" if not tools:
            raise RequestProblem(
                400, "tool_choice is 'required', but there are no tools", param="tool_choice"
            )
        case "none":
            return ToolUse([], "none")  # the model is not shown what it must not use
    return ToolUse(tools, choice or ("auto" if tools else "none"), strict)


def check_template_shows(tools: Sequence[Mapping[str, Any]], tokenizer: TextTokenizer) -> None:
    """Refuses tools that the model would never see.

    Raises:
        RequestProblem: 400; the template does not read them.
    """
    if tools and tokenizer.has_chat_template and not tokenizer.template_mentions("tools"):
        raise RequestProblem(
            400,
            "tools are not supported: the model's chat template knows no tools; --chat-template sets another",
            param="tools",
            code="unsupported_parameter",
        )


def template_messages(
    messages: Sequence[Mapping[str, Any]], tokenizer: TextTokenizer
) -> list[dict[str, Any]]:
    """Messages in the words of Hugging Face's templates: no nulls, roles that the template knows."""
    knows_developer = tokenizer.template_mentions("developer")
    as_objects = tokenizer.template_takes_argument_objects
    plain = [_message(message, knows_developer, as_objects) for message in messages]
    if tokenizer.template_mentions("thinking") and not tokenizer.template_mentions("reasoning_content"):
        for message in plain:  # gpt-oss's word for it
            if "reasoning_content" in message:
                message["thinking"] = message.pop("reasoning_content")
    return plain


def template_options(body: ChatLike, tokenizer: TextTokenizer, *, can_reason: bool) -> dict[str, Any]:
    """Return the variables for the template.

    Variables that the template does not read have no effect, as in transformers. Some clients send the same
    variables to every model.

    Raises:
        RequestProblem: 400; the template does not know the effort that is asked for.
    """
    options = dict(body.chat_template_kwargs or {})
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
            f"reasoning_effort {effort!r} is not supported: the model's chat template knows no such thing",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return options


def plain_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """As the client wrote it, nulls and ``strict``, which is not for the model to read, left out."""
    function = {
        key: value for key, value in tool["function"].items() if value is not None and key != "strict"
    }
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": tool["type"], "function": function}


def _check_name(name: str, names: Sequence[str], param: str) -> None:
    if name not in names:
        known = ", ".join(names) or "none"
        raise RequestProblem(400, f"{param} is {name!r}, which is no tool (tools: {known})", param=param)


def _message(message: Mapping[str, Any], knows_developer: bool, as_objects: bool) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None and key in _KEPT}
    if plain["role"] == "developer" and not knows_developer:
        plain["role"] = "system"
    if message.get("reasoning") is not None:
        plain.setdefault("reasoning_content", message["reasoning"])
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = [_part(part) for part in content] or ""
    elif content is None:
        plain["content"] = message.get("refusal") or ""
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
    else:
        plain["tool_calls"] = [_call(call, as_objects) for call in plain["tool_calls"]]
    return plain


_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "refusal":
        return {"type": "text", "text": part["refusal"]}
    return {key: value for key, value in part.items() if value is not None}


def _call(call: Mapping[str, Any], as_objects: bool) -> dict[str, Any]:
    arguments = call["function"].get("arguments")
    if as_objects:
        arguments = _object(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    named = {"id": call["id"]} if call.get("id") is not None else {}
    return {
        **named,
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": arguments},
    }


def _object(arguments: Any) -> Any:
    """JSON text of an object as that object; a model's broken JSON stays the text that it is."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
