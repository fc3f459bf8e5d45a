"""Builds responses in Ollama's format: one JSON object, or a stream of JSON lines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TypedDict

import msgspec

from penstock.serve.api.choice_decoder import ChoiceDelta
from penstock.serve.api.generation import GenerationJob
from penstock.serve.api.usage import Usage
from penstock.serve.http.problems import Problem, ollama_error
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.parsers import Content, Event, Reasoning, ToolCallArguments, ToolCallStart


class _Message(TypedDict, total=False):
    """A message, or the part of a message in one line of a stream."""

    content: str
    thinking: str
    tool_calls: list[dict[str, object]]


class OllamaBuilder:
    """Builds the JSON object or the JSON lines of one response.

    Args:
        model: the name of the model, as in the request.
        job: has the decoder of the only choice.
        record: has the times of arrival, of admission and of the first token.
        is_chat: whether the text is in the member ``message``. Otherwise it is in ``response``.
        hides_thinking: whether the reasoning is left out.
    """

    media_type = "application/x-ndjson"

    def __init__(
        self, model: str, job: GenerationJob, record: RequestRecord, *, is_chat: bool, hides_thinking: bool
    ) -> None:
        self._model = model
        self._choice = job.choices[0]
        self._record = record
        self._is_chat = is_chat
        self._hides_thinking = hides_thinking
        self._open_call: tuple[ToolCallStart, list[str]] | None = None

    def whole_response(self, outputs: Sequence[ChoiceDelta], usage: Usage) -> Iterable[bytes]:
        """Yield the JSON of a response that is not streamed."""
        message: _Message = {"content": ""}
        for part in [*self._message_parts(outputs[0].events), *self._end_call()]:
            if "content" in part:
                message["content"] += part["content"]
            if "thinking" in part:
                message["thinking"] = message.get("thinking", "") + part["thinking"]
            if "tool_calls" in part:
                message["tool_calls"] = [*message.get("tool_calls", ()), *part["tool_calls"]]
        yield msgspec.json.encode(self._response_object(message, done=True, **self._final_members(usage)))

    def begin(self) -> bytes:
        """Return no lines, because Ollama's API has none before the first delta."""
        return b""

    def events(self, index: int, delta: ChoiceDelta, usage: Usage | None = None) -> Iterable[bytes]:
        """Return the lines of a delta."""
        return [self._line(part) for part in self._message_parts(delta.events)]

    def end(self, usage: Usage) -> bytes:
        """Return the lines after the last delta."""
        lines = [self._line(part) for part in self._end_call()]
        last = self._response_object({"content": ""}, done=True, **self._final_members(usage))
        return b"".join([*lines, msgspec.json.encode(last) + b"\n"])

    def ping(self) -> bytes:
        """Return no bytes, because JSON lines have no comments that could be sent during a pause."""
        return b""

    def error(self, problem: Problem) -> bytes:
        """Return the error line that ends the stream."""
        return msgspec.json.encode(ollama_error(problem)) + b"\n"

    def _line(self, part: _Message) -> bytes:
        return msgspec.json.encode(self._response_object({"content": "", **part}, done=False)) + b"\n"

    def _response_object(self, message: _Message, **members: object) -> dict[str, object]:
        common_members = {"model": self._model, "created_at": current_time()}
        if self._is_chat:
            return {**common_members, "message": {"role": "assistant", **message}, **members}
        thinking = {"thinking": message["thinking"]} if "thinking" in message else {}
        return {**common_members, "response": message["content"], **thinking, **members}

    def _message_parts(self, events: Sequence[Event]) -> list[_Message]:
        """Return the parts of the message for parser events. A tool call is returned when it is complete."""
        parts: list[_Message] = []
        for event in events:
            match event:
                case Content():
                    parts += [*self._end_call(), {"content": event.text}]
                case Reasoning():
                    if not self._hides_thinking:
                        parts.append({"thinking": event.text})
                case ToolCallStart():
                    parts += self._end_call()
                    self._open_call = event, []
                case ToolCallArguments() if self._open_call is not None:
                    self._open_call[1].append(event.text)
        return parts

    def _end_call(self) -> list[_Message]:
        """Close the open tool call and return it as one message part; an empty list if no call is open."""
        if self._open_call is None:
            return []
        (start, argument_parts), self._open_call = self._open_call, None
        try:
            arguments = msgspec.json.decode("".join(argument_parts) or "{}")
        except msgspec.DecodeError:  # the output ended inside the arguments
            arguments = {}
        function = {"index": start.index, "name": start.name, "arguments": arguments}
        return [{"tool_calls": [{"id": start.id, "function": function}]}]

    def _final_members(self, usage: Usage) -> dict[str, object]:
        """Return the finish reason, the token counts, and the durations in nanoseconds."""
        record, end = self._record, time.perf_counter()
        first_token_at = record.first_token_at or end
        return {
            "done_reason": "length" if self._choice.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(end - record.received_at),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first_token_at - (record.admitted_at or record.received_at)),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(end - first_token_at),
        }


def current_time() -> str:
    """Return the current time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
