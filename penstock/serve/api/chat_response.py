"""Builds chat responses in OpenAI's format: one object, or the chunks of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NotRequired, TypedDict

from penstock.serve.api.choice_decoder import ChoiceDelta
from penstock.serve.api.json_parts import Parts, array, event_parts, with_members
from penstock.serve.api.token_scores import ChatScores
from penstock.serve.api.usage import Usage
from penstock.serve.http.sse import DONE, EventTemplate, OpenAIStream, event
from penstock.serve.parsers import Content, Event, Reasoning, ToolCallArguments, ToolCallStart


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """The members that all objects of one response share."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def parts(
        self, object_type: str, members: Mapping[str, Iterable[bytes]], **extra_members: object
    ) -> Parts:
        """Yield the JSON of a response object or of a chunk.

        Args:
            object_type: the value of the member ``object``.
            members: name of a member -> parts of its JSON. Must have the member ``choices``.
            **extra_members: further members, as values that are not yet encoded.
        """
        chunk_members = self.response_object(object_type, [], **extra_members)
        del chunk_members["choices"]
        return with_members(chunk_members, **members)

    def response_object(
        self, object_type: str, choices: Sequence[object], **extra_members: object
    ) -> dict[str, object]:
        """Return a response object or a chunk with its choices and further members."""
        return {
            "id": self.id,
            "object": object_type,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": self.system_fingerprint,
            **extra_members,
        }


class FunctionDelta(TypedDict):
    """The member ``function`` of a tool call or of a part of a tool call."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A tool call. In a chunk of a stream, it may have only the next part of the arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[str]
    function: FunctionDelta


class ChatResponse(OpenAIStream):
    """Builds the object or the stream events of one chat response.

    Args:
        envelope: the members that all objects share.
        scores: encodes the log probabilities of the output; None if they are not requested.
        prompt_scores: encodes the log probabilities of the prompt; None if they are not requested. A stream
            cannot have them.
        prompt_token_ids: the token ids of the prompt; None if token ids are not requested. If given, the
            choices also have the token ids of the output.
        include_usage: whether each chunk has the member ``usage`` and the last chunk has the total usage. In
            the other chunks, the value is null unless `events` gets a usage.
        reasoning_fields: the names of the members that contain the reasoning.
    """

    def __init__(
        self,
        envelope: Envelope,
        *,
        scores: ChatScores | None = None,
        prompt_scores: Callable[[], Parts] | None = None,
        prompt_token_ids: list[int] | None = None,
        include_usage: bool = False,
        reasoning_fields: Sequence[str] = ("reasoning_content",),
    ) -> None:
        self._envelope = envelope
        self._reasoning_fields = reasoning_fields
        self._scores = scores
        self._prompt_scores = prompt_scores
        self._prompt_token_ids = prompt_token_ids
        self._include_usage = include_usage
        self._started_choices: set[int] = set()
        self._templates: dict[int, EventTemplate] = {}

    def whole_response(self, outputs: Sequence[ChoiceDelta], usage: Usage) -> Parts:
        """Yield the JSON of a response that is not streamed."""
        choices = (self._choice(index, output) for index, output in enumerate(outputs))
        extra_members: dict[str, object] = {"usage": usage}
        if self._prompt_token_ids is not None:
            extra_members["prompt_token_ids"] = self._prompt_token_ids
        members: dict[str, Iterable[bytes]] = {"choices": array(choices)}
        if self._prompt_scores is not None:
            members["prompt_logprobs"] = self._prompt_scores()
        return self._envelope.parts("chat.completion", members, **extra_members)

    def events(self, index: int, delta: ChoiceDelta, usage: Usage | None = None) -> Iterable[bytes]:
        """Return the events of a delta. The first event of a choice contains the role.

        Args:
            index: the index of the choice.
            delta: the new output of the choice.
            usage: the usage up to and including `delta`, if every chunk must have a usage, else None.
        """
        usage_before = _without_last_tokens(usage, delta.num_tokens)
        first_event = b"" if index in self._started_choices else self._first_event(index, usage_before)
        only_event = delta.events[0] if len(delta.events) == 1 else None
        is_plain = self._scores is None and self._prompt_token_ids is None and usage is None
        if is_plain and isinstance(only_event, Content):  # the fast path: most chunks are plain text
            last_event = b"" if delta.finish_reason is None else self._last_event(index, delta, None)
            return (b"%b%b%b" % (first_event, self._template(index).with_value(only_event.text), last_event),)
        message_delta = self._message_delta(delta.events)
        last_event = b"" if delta.finish_reason is None else self._last_event(index, delta, usage)
        usage_so_far = _without_last_tokens(usage, delta.num_tokens - len(delta.token_ids))
        if self._scores is not None and delta.scores:
            return chain(
                (first_event,), self._scored_chunk(index, message_delta, delta, usage_so_far), (last_event,)
            )
        has_delta = bool(message_delta or (self._prompt_token_ids is not None and delta.token_ids))
        delta_event = (
            event(self._chunk(index, message_delta, delta, usage=usage_so_far)) if has_delta else b""
        )
        return (first_event + delta_event + last_event,)

    def begin(self) -> bytes:
        """Return no events. Chat completions have none before the first delta."""
        return b""

    def end(self, usage: Usage) -> bytes:
        """Return the events after the last delta: the total usage, if requested, and ``[DONE]``."""
        return (self._usage_event(usage) if self._include_usage else b"") + DONE

    def _usage_event(self, usage: Usage) -> bytes:
        return event(self._envelope.response_object("chat.completion.chunk", [], usage=usage))

    def _first_event(self, index: int, usage: Usage | None) -> bytes:
        extra_members: dict[str, object] = {}
        if self._prompt_token_ids is not None and not self._started_choices:
            extra_members["prompt_token_ids"] = self._prompt_token_ids
        self._started_choices.add(index)
        return event(
            self._chunk(index, {"role": "assistant", "content": ""}, usage=usage, extra_members=extra_members)
        )

    def _last_event(self, index: int, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        return event(self._chunk(index, {}, finish_reason=delta.finish_reason, usage=usage))

    def _template(self, index: int) -> EventTemplate:
        if index not in self._templates:
            self._templates[index] = EventTemplate(self._chunk(index, {"content": EventTemplate.PLACEHOLDER}))
        return self._templates[index]

    def _scored_chunk(
        self, index: int, message_delta: dict[str, object], delta: ChoiceDelta, usage: Usage | None
    ) -> Parts:
        assert self._scores is not None
        choice = self._chunk_choice(index, message_delta, delta, None)
        del choice["logprobs"]
        choice_with_logprobs = with_members(choice, logprobs=self._scores.parts(delta.scores))
        members = {"choices": array([choice_with_logprobs])}
        return event_parts(self._envelope.parts("chat.completion.chunk", members, **self._usage(usage)))

    def _chunk(
        self,
        index: int,
        message_delta: dict[str, object],
        delta: ChoiceDelta | None = None,
        *,
        finish_reason: str | None = None,
        usage: Usage | None = None,
        extra_members: Mapping[str, object] | None = None,
    ) -> dict[str, object]:
        choice = self._chunk_choice(index, message_delta, delta, finish_reason)
        members = {**(extra_members or {}), **self._usage(usage)}
        return self._envelope.response_object("chat.completion.chunk", [choice], **members)

    def _chunk_choice(
        self,
        index: int,
        message_delta: dict[str, object],
        delta: ChoiceDelta | None,
        finish_reason: str | None,
    ) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "delta": message_delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        if delta is not None and self._prompt_token_ids is not None:
            choice["token_ids"] = delta.token_ids
        return choice

    def _usage(self, usage: Usage | None) -> dict[str, object]:
        """Return the member ``usage`` of a chunk; an empty dict if chunks do not have this member."""
        return {"usage": usage} if self._include_usage or usage is not None else {}

    def _choice(self, index: int, delta: ChoiceDelta) -> Parts:
        choice: dict[str, object] = {
            "index": index,
            "message": self._message(delta),
            "finish_reason": delta.finish_reason,
        }
        if self._prompt_token_ids is not None:
            choice["token_ids"] = delta.token_ids
        scores = (b"null",) if self._scores is None else self._scores.parts(delta.scores)
        return with_members(choice, logprobs=scores)

    def _message(self, delta: ChoiceDelta) -> dict[str, object]:
        calls = _tool_call_deltas(delta.events)
        message: dict[str, object] = {
            "role": "assistant",
            "content": delta.content or (None if calls else ""),
            "refusal": None,
        }
        if reasoning := delta.reasoning:
            message |= dict.fromkeys(self._reasoning_fields, reasoning)
        if calls:
            message["tool_calls"] = [
                {"id": call["id"], "type": call["type"], "function": call["function"]} for call in calls
            ]
        return message

    def _message_delta(self, events: Sequence[Event]) -> dict[str, object]:
        """Return the ``delta`` member of a chunk. Members without a value are left out, not null.

        Some clients refuse null members.
        """
        message_delta: dict[str, object] = {}
        contents = [event.text for event in events if isinstance(event, Content)]
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        if contents:
            message_delta["content"] = "".join(contents)
        if reasoning:
            message_delta |= dict.fromkeys(self._reasoning_fields, reasoning)
        if calls := _tool_call_deltas(events):
            message_delta["tool_calls"] = calls
        return message_delta


def _without_last_tokens(usage: Usage | None, num_tokens: int) -> Usage | None:
    """Return the usage before the last `num_tokens` tokens were generated; None if `usage` is None."""
    if usage is None or not num_tokens:
        return usage
    completion = usage["completion_tokens"] - num_tokens
    details = usage["completion_tokens_details"]
    reasoning = min(completion, details["reasoning_tokens"])
    return {
        **usage,
        "completion_tokens": completion,
        "total_tokens": usage["total_tokens"] - num_tokens,
        "completion_tokens_details": {**details, "reasoning_tokens": reasoning},
    }


def _tool_call_deltas(events: Sequence[Event]) -> list[ToolCallDelta]:
    """Return the ``tool_calls`` entries of the events, one per call."""
    calls: dict[int, ToolCallDelta] = {}
    for parser_event in events:
        if isinstance(parser_event, ToolCallStart):
            function: FunctionDelta = {"name": parser_event.name, "arguments": ""}
            calls[parser_event.index] = {
                "index": parser_event.index,
                "id": parser_event.id,
                "type": "function",
                "function": function,
            }
        elif isinstance(parser_event, ToolCallArguments):
            call = calls.setdefault(
                parser_event.index, {"index": parser_event.index, "function": {"arguments": ""}}
            )
            call["function"]["arguments"] += parser_event.text
    return list(calls.values())
