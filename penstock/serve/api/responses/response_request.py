"""`PreparedResponse`: a validated Responses request with its chat request, its history and items to store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.serve.api.chat_prompt import raw_messages, template_supports_effort
from penstock.serve.api.conversation import Conversation
from penstock.serve.api.responses.mcp_events import ApprovedCall
from penstock.serve.api.responses.offered_tools import OfferedTools, ToolListing
from penstock.serve.api.responses.response_input import chat_request
from penstock.serve.api.responses.response_output import new_id
from penstock.serve.api.responses.response_schema import INCLUDE_LOGPROBS, InputItem, ResponsesBody
from penstock.serve.api.responses.response_store import StoredResponse
from penstock.serve.api.responses.tool_input import hosted_tool_types
from penstock.serve.api.text_generation import checked_body
from penstock.serve.api.translation import Translation
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services


@dataclass(frozen=True)
class PreparedResponse:
    """A request that has been validated, rendered with the chat template and tokenized."""

    body: ResponsesBody
    conversation: Conversation
    items: list[dict[str, object]]
    """All input items, including the items of previous responses."""
    warnings: Sequence[str]
    """Descriptions of the hosted tools and settings that the server ignores, for the log."""
    translation: Translation
    """The chat request to which the request was translated."""
    offered_tools: OfferedTools
    listings: Sequence[ToolListing]
    """The tool lists that no input item contains. They are added to the output."""
    approved_calls: Sequence[ApprovedCall]
    """The calls of earlier responses that the client approves in this request."""

    @classmethod
    def of(
        cls,
        services: Services,
        raw: object,
        previous_response: StoredResponse | None,
        offered_tools: OfferedTools,
    ) -> PreparedResponse:
        """Validate a request, render its prompt and encode it. Blocks: call it in a thread pool.

        Args:
            services: the objects that routes use.
            raw: the decoded request body.
            previous_response: the response that this request continues, or None.
            offered_tools: the tools of tool servers.

        Raises:
            RequestProblem: 400; the message names the invalid field.
            UnknownModelError: the server has no model or adapter with the requested name.
        """
        body = checked_body(services, ResponsesBody, raw)
        _check_combinations(body)
        body, warnings = _without_unsupported_effort(services, body)
        history = [] if previous_response is None else previous_response.history()
        earlier_items = [InputItem.model_validate(item) for item in history]
        translation = chat_request(
            services, body, earlier_items, offered_tools, hosted_tools=services.config.hosted_tools
        )
        warnings += [
            f"the hosted tool {name}, which the server does not have" for name in hosted_tool_types(body)
        ]
        conversation = _conversation(services, body, translation, new_id("resp"))
        assert isinstance(raw, dict)
        items = [*history, *_input_items(raw["input"])]
        all_items = [*earlier_items, *(body.input if isinstance(body.input, list) else ())]
        listed_servers = {item.server_label for item in all_items if item.type == "mcp_list_tools"}
        listings = [listing for listing in offered_tools.listings if listing.label not in listed_servers]
        approved_calls = _approved_calls(all_items, len(earlier_items), offered_tools)
        return cls(body, conversation, items, warnings, translation, offered_tools, listings, approved_calls)

    def next_turn(
        self,
        services: Services,
        messages: Sequence[dict[str, object]],
        request_id: str,
        *,
        has_tools: bool,
        max_tokens: int | None,
    ) -> Conversation:
        """Return the conversation of a later turn. Blocks: call it in a thread pool.

        A ``tool_choice`` that requires a tool call applies only to the first turn.

        Args:
            services: the objects that routes use.
            messages: the messages of the earlier turns: the model's output and the outputs of its tool calls.
            request_id: the id of the new context.
            has_tools: whether the model may call tools.
            max_tokens: ``max_output_tokens`` minus the output tokens of the earlier turns; None without
                ``max_output_tokens``.

        Raises:
            RequestProblem: 400; the prompt is too long.
        """
        chat = {
            **self.translation.translated_body,
            "messages": [*raw_messages(self.translation.translated_body), *messages],
        }
        field_paths = [*self.translation.message_paths, *["the output of tool servers"] * len(messages)]
        choice = chat.get("tool_choice")
        if not has_tools:
            chat["tool_choice"] = "none"
        elif choice == "required" or (isinstance(choice, dict) and choice["type"] == "function"):
            chat["tool_choice"] = "auto"
        elif isinstance(choice, dict):
            chat["tool_choice"] = {**choice, "allowed_tools": {**choice["allowed_tools"], "mode": "auto"}}
        if max_tokens is not None:
            chat["max_completion_tokens"] = max_tokens
        translation = replace(self.translation, translated_body=chat, message_paths=field_paths)
        return _conversation(services, self.body, translation, request_id)


def _check_combinations(body: ResponsesBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestProblem(400, "stream_options requires stream to be true", param="stream_options")
    if body.background and not body.is_stored:
        raise RequestProblem(400, "background requires store to be true", param="background")
    if body.top_logprobs and not body.includes(INCLUDE_LOGPROBS):
        raise RequestProblem(
            400, f"top_logprobs requires {INCLUDE_LOGPROBS!r} in include", param="top_logprobs"
        )


def _without_unsupported_effort(services: Services, body: ResponsesBody) -> tuple[ResponsesBody, list[str]]:
    """Remove ``reasoning`` if the chat template does not support its effort. Return the body and warnings.

    The effort is not refused, because some agents send it to every model.
    """
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is None or template_supports_effort(services.tokenizer, effort):
        return body, []
    return body.model_copy(update={"reasoning": None}), [
        "reasoning.effort, which the chat template does not use"
    ]


def _approved_calls(
    items: Sequence[InputItem], num_earlier_items: int, offered_tools: OfferedTools
) -> list[ApprovedCall]:
    """Return the calls that this request approves, except calls that have already run.

    Args:
        items: the items of previous responses, then the items of this request.
        num_earlier_items: the number of items of previous responses.
        offered_tools: the tools of tool servers.

    Raises:
        RequestProblem: 400; this request does not offer an approved tool.
    """
    approval_requests = {item.id: item for item in items if item.type == "mcp_approval_request"}
    called_ids = {item.approval_request_id for item in items if item.type == "mcp_call"}
    calls = []
    for index, item in enumerate(items[num_earlier_items:]):
        request_id = item.approval_request_id
        if (
            item.type != "mcp_approval_response"
            or not item.approve
            or request_id is None
            or request_id in called_ids
        ):
            continue
        request = approval_requests[request_id]  # `ChatMessages` has checked that the item exists
        field_path = f"input[{index}].approval_request_id"
        label, tool_name = request.server_label or "", request.name or ""
        function_name = offered_tools.function_name(label, tool_name)
        offered_tool = offered_tools.functions.get(function_name)
        if offered_tool is None or (offered_tool.label, offered_tool.tool.name) != (label, tool_name):
            raise RequestProblem(
                400,
                f"{field_path} approves {tool_name[:100]!r} of the server {label[:100]!r}, but the request "
                "does not offer this tool: send the tools of the earlier request again",
                param=field_path,
            )
        called_ids.add(request_id)
        calls.append(
            ApprovedCall(new_id("call"), offered_tool, function_name, request.arguments or "", request_id)
        )
    return calls


def _conversation(
    services: Services, body: ResponsesBody, translation: Translation, request_id: str
) -> Conversation:
    if body.truncation == "auto":
        return _truncated_conversation(services, body, translation, request_id)
    return translation.conversation(services, request_id)


def _truncated_conversation(
    services: Services, body: ResponsesBody, translation: Translation, request_id: str
) -> Conversation:
    """Return the conversation without its oldest turns, so that prompt and output fit the maximum length.

    Reserves ``max_output_tokens`` tokens for the output, but at most half of the maximum length; without this
    field, a quarter of the maximum length. Removes as few turns as possible. Keeps the instructions at the
    beginning. Also keeps the last turn, even if fewer tokens than the reserved number remain for the output.
    If turns are removed, the first remaining turn begins with a user message.

    Raises:
        RequestProblem: 400; the last turn alone is too long, or the request is invalid.
    """
    messages = raw_messages(translation.translated_body)
    num_instructions = next(
        (index for index, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0
    )
    turn_starts = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "user" and index > num_instructions
    ]
    limit = services.worker.info.max_length
    num_output_tokens = min(body.max_output_tokens or limit // 4, limit // 2)

    def conversation_from(start: int) -> Conversation | None:
        indices = [*range(num_instructions), *range(start, len(messages))]
        chat = {**translation.translated_body, "messages": [messages[index] for index in indices]}
        field_paths = [translation.message_paths[index] for index in indices]
        is_last = start == (turn_starts[-1] if turn_starts else num_instructions)
        try:
            conversation = replace(translation, translated_body=chat, message_paths=field_paths).conversation(
                services, request_id
            )
        except RequestProblem as problem:
            if problem.code == "context_length_exceeded" and not is_last:
                return None
            raise
        return (
            conversation
            if is_last or len(conversation.context.prompt_tokens) + num_output_tokens <= limit
            else None
        )

    if (whole_conversation := conversation_from(num_instructions)) is not None:
        return whole_conversation
    low, high, shortest_cut = 0, len(turn_starts) - 1, None
    while low < high:  # binary search for the first turn from which the prompt fits
        middle = (low + high) // 2
        if (conversation := conversation_from(turn_starts[middle])) is not None:
            shortest_cut, high = conversation, middle
        else:
            low = middle + 1
    fitting_conversation = conversation_from(turn_starts[-1]) if shortest_cut is None else shortest_cut
    assert fitting_conversation is not None
    return fitting_conversation


def _input_items(request_input: object) -> list[dict[str, object]]:
    """Return the input of a request in the form of ``/v1/responses/{id}/input_items``."""
    items = [{"role": "user", "content": request_input}] if isinstance(request_input, str) else request_input
    assert isinstance(items, list)
    return [_input_item(item) for item in items]


def _input_item(item: Mapping[str, object]) -> dict[str, object]:
    item_type = str(item.get("type") or "message")
    id_prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}.get(item_type, "item")
    listed_item = {**item, "type": item_type, "id": item.get("id") or new_id(id_prefix)}
    content = item.get("content")
    if item_type == "message" and isinstance(content, str):
        part_type = "output_text" if item.get("role") == "assistant" else "input_text"
        extra_members: dict[str, object] = {"annotations": []} if part_type == "output_text" else {}
        listed_item["content"] = [{"type": part_type, "text": content, **extra_members}]
    if item_type == "message":
        listed_item.setdefault("status", "completed")
    return {name: value for name, value in listed_item.items() if value is not None}
