"""Translates Ollama's requests to chat and completion requests."""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.serve.api.chat_prompt import template_supports_effort
from penstock.serve.api.ollama.ollama_schema import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
)
from penstock.serve.api.translation import Translation
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services

CLIENT_FIELD_NAMES: Mapping[str, str] = {
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "reasoning_effort": "think",
    **{
        name: f"options.{name}"
        for name in "temperature top_k top_p min_p seed stop presence_penalty frequency_penalty".split()
    },
    "repetition_penalty": "options.repeat_penalty",
}
"""Field of a chat or completion request -> field of Ollama's request, for error messages."""


def served_model_name(services: Services, name: str) -> str:
    """Return the name of the served model or adapter for a requested name.

    A requested name may have the additional tag ``:latest``. An unknown name is returned unchanged.
    """
    model_names = {services.model_name, *services.worker.adapters}
    untagged_name = name.removesuffix(":latest")
    return untagged_name if name not in model_names and untagged_name in model_names else name


def translate_chat(services: Services, body: OllamaChatBody) -> Translation:
    """Translate a request to ``/api/chat`` to a chat request.

    Raises:
        RequestProblem: 400; ``options.num_ctx`` is too large, or the model does not support this ``think``.
    """
    messages: list[dict[str, object]] = []
    pending_call_ids: list[str] = []
    for message_index, message in enumerate(body.messages or ()):
        messages.append(_message(message, message_index, pending_call_ids))
    chat: dict[str, object] = {
        **_shared_fields(services, body),
        **_reasoning_fields(services, body),
        "messages": messages,
    }
    if body.tools:
        chat["tools"] = [tool.model_dump(exclude_unset=True) for tool in body.tools]
    field_paths = [f"messages[{index}]" for index in range(len(messages))]
    tool_paths = [f"tools[{index}]" for index in range(len(body.tools or ()))]
    return Translation(
        chat, field_paths, tool_paths, {**CLIENT_FIELD_NAMES, "tools.parameters": "function.parameters"}
    )


def translate_generate_to_chat(services: Services, body: OllamaGenerateBody) -> Translation:
    """Translate a request to ``/api/generate`` to a chat request. The chat template is applied.

    Raises:
        RequestProblem: see `translate_chat`.
    """
    messages: list[dict[str, object]] = (
        [] if not body.system else [{"role": "system", "content": body.system}]
    )
    field_paths = ["system"] * len(messages)
    messages.append({"role": "user", "content": _with_images(body.prompt or "", body.images)})
    chat = {**_shared_fields(services, body), **_reasoning_fields(services, body), "messages": messages}
    return Translation(chat, [*field_paths, "prompt"], (), CLIENT_FIELD_NAMES)


def translate_generate_to_completion(services: Services, body: OllamaGenerateBody) -> Translation:
    """Translate a request to ``/api/generate`` to a completion request. The chat template is not applied.

    Raises:
        RequestProblem: 400; a field requires the chat template, or ``options.num_ctx`` is too large.
    """
    for name in ("system", "images", "think"):
        if getattr(body, name):
            raise RequestProblem(400, f"{name} requires the chat template: omit raw and suffix", param=name)
    fields = _shared_fields(services, body)
    return Translation(
        {**fields, "prompt": body.prompt or "", "suffix": body.suffix or None}, (), (), CLIENT_FIELD_NAMES
    )


def _shared_fields(services: Services, body: OllamaBody) -> dict[str, object]:
    fields: dict[str, object] = {"model": served_model_name(services, body.model), "stream": body.streams}
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        schema = {"name": "format", "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    options = body.options
    if options is not None:
        limit = services.worker.info.max_length
        if options.num_ctx is not None and options.num_ctx > limit:
            raise RequestProblem(
                400,
                f"options.num_ctx must be at most the server's --max-length {limit}, was {options.num_ctx}",
                param="options.num_ctx",
            )
        names = "temperature top_k top_p min_p stop presence_penalty frequency_penalty".split()
        fields |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
        if options.seed is not None and options.seed != -1:
            fields["seed"] = options.seed
        if options.repeat_penalty is not None:
            fields["repetition_penalty"] = options.repeat_penalty
    num_predict = -1 if options is None or options.num_predict is None else options.num_predict
    max_length = services.worker.info.max_length
    fields["max_completion_tokens"] = max_length if num_predict < 0 else max(1, num_predict)
    return fields


def _reasoning_fields(services: Services, body: OllamaBody) -> dict[str, object]:
    think = body.think
    if think is None:
        return {}
    settings: dict[str, object] = {"include_reasoning": think is not False}
    if services.tokenizer.template_mentions("enable_thinking"):
        settings["chat_template_kwargs"] = {"enable_thinking": think is not False}
    elif think is True and services.parsers.reasoning_format_name is None:
        raise RequestProblem(400, f"{body.model!r} does not support thinking", param="think")
    if isinstance(think, str):
        if not template_supports_effort(services.tokenizer, think):
            raise RequestProblem(
                400, f"think {think!r} is not supported: the chat template has no such effort", param="think"
            )
        settings["reasoning_effort"] = think
    return settings


def _message(message: OllamaMessage, message_index: int, pending_call_ids: list[str]) -> dict[str, object]:
    """Translate a message to a chat message.

    Ollama's tool calls may have no id. This function creates the missing ids. Tool results without an id are
    matched by their order to the calls of the last message with tool calls.

    Args:
        message: the message of the client.
        message_index: the index of the message in the request.
        pending_call_ids: the ids of tool calls that have no result yet. The function updates this list.
    """
    chat_message: dict[str, object] = {
        "role": message.role,
        "content": _with_images(message.content or "", message.images),
    }
    if message.thinking:
        chat_message["reasoning_content"] = message.thinking
    if message.tool_calls:
        calls = []
        pending_call_ids.clear()
        for index, call in enumerate(message.tool_calls):
            call_id = call.id or f"call_{message_index}_{index}"
            pending_call_ids.append(call_id)
            arguments = json.dumps(call.function.arguments or {}, ensure_ascii=False)
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
        chat_message["tool_calls"] = calls
    if message.role == "tool":
        result_id = message.tool_call_id
        if result_id is None:
            result_id = pending_call_ids.pop(0) if pending_call_ids else f"call_{message_index}"
        elif result_id in pending_call_ids:
            pending_call_ids.remove(result_id)
        chat_message["tool_call_id"] = result_id
        if message.tool_name:
            chat_message["name"] = message.tool_name
    return chat_message


def _with_images(text: str, images: list[str] | None) -> str | list[dict[str, object]]:
    """Return the content of a message. Images come before the text, as in training data of vision models."""
    if not images:
        return text
    urls = [image if image.startswith("data:") else f"data:image/png;base64,{image}" for image in images]
    parts: list[dict[str, object]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}]
