"""Builds a response of the Messages API: a message object, or the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from penstock.serve.api.choice_decoder import ChoiceDelta
from penstock.serve.api.generation import GenerationJob
from penstock.serve.api.messages.message_schema import MessagesBody
from penstock.serve.api.usage import Usage
from penstock.serve.http.problems import Problem, anthropic_error
from penstock.serve.http.sse import named_event
from penstock.serve.parsers import Content, Event, Reasoning, ToolCallArguments, ToolCallStart

THINKING_SIGNATURE = "penstock"
"""The signature of every thinking block. Anthropic's API requires one. The server does not check it."""
_PING_EVENT = named_event({"type": "ping"})


class MessageBuilder:
    """Builds the message or the events of one response.

    Args:
        body: the request.
        message_id: the id of the message.
        job: has the context and the decoder of the only choice.
    """

    media_type = "text/event-stream"

    def __init__(self, body: MessagesBody, message_id: str, job: GenerationJob) -> None:
        self._body = body
        self._id = message_id
        self._choice = job.choices[0]
        self._num_prompt_tokens = job.num_prompt_tokens
        self._hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._blocks: list[dict[str, object]] = []
        self._is_block_open = False
        """Whether the last content block is open, that is, has no ``content_block_stop`` event yet."""
        self._text_parts: list[str] = []
        """The parts of the open block's text, thinking or tool arguments."""

    def whole_response(self, outputs: Sequence[ChoiceDelta], usage: Usage) -> Iterable[bytes]:
        """Yield the JSON of a message that is not streamed."""
        (output,) = outputs
        self._add(output.events)
        self._close()
        yield msgspec.json.encode(
            self._message(**self._stop_fields(), usage=_usage(usage), content=self._blocks)
        )

    def begin(self) -> bytes:
        """Return the event that begins the message."""
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0} | _ZERO_CACHE_USAGE
        message = self._message(stop_reason=None, stop_sequence=None, usage=usage, content=[])
        return named_event({"type": "message_start", "message": message})

    def events(self, index: int, delta: ChoiceDelta, usage: Usage | None = None) -> Iterable[bytes]:
        """Return the events of a delta."""
        return (b"".join(map(named_event, self._add(delta.events))),)

    def end(self, usage: Usage) -> bytes:
        """Return the events that end the message."""
        new_events = self._close()
        new_events.append({"type": "message_delta", "delta": self._stop_fields(), "usage": _usage(usage)})
        new_events.append({"type": "message_stop"})
        return b"".join(map(named_event, new_events))

    def ping(self) -> bytes:
        """Return the event that is sent during a pause, so that proxies do not close the connection."""
        return _PING_EVENT

    def error(self, problem: Problem) -> bytes:
        """Return the error event that ends the stream."""
        return named_event(anthropic_error(problem))

    def _message(self, **members: object) -> dict[str, object]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._body.model, **members}

    def _stop_fields(self) -> dict[str, object]:
        """Return the members ``stop_reason`` and ``stop_sequence`` of the message."""
        match self._choice.finish_reason:
            case "length":
                is_context_full = self._choice.num_tokens < self._body.max_tokens
                reason = "model_context_window_exceeded" if is_context_full else "max_tokens"
            case "tool_calls":
                reason = "tool_use"
            case _:
                reason = "end_turn" if self._choice.stop_match is None else "stop_sequence"
        stop_sequence = self._choice.stop_match if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop_sequence}

    def _add(self, events: Sequence[Event]) -> list[dict[str, object]]:
        """Add output to the content blocks. Return the stream events for it."""
        new_events: list[dict[str, object]] = []
        for event in events:
            match event:
                case Content():
                    self._begin({"type": "text", "text": ""}, new_events)
                    self._text_parts.append(event.text)
                    new_events.append(self._delta(type="text_delta", text=event.text))
                case Reasoning():
                    self._begin({"type": "thinking", "thinking": "", "signature": ""}, new_events)
                    if not self._hides_thinking:
                        self._text_parts.append(event.text)
                        new_events.append(self._delta(type="thinking_delta", thinking=event.text))
                case ToolCallStart():
                    new_events += self._close()
                    self._begin(
                        {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}, new_events
                    )
                case ToolCallArguments():
                    self._text_parts.append(event.text)
                    new_events.append(self._delta(type="input_json_delta", partial_json=event.text))
        return new_events

    def _begin(self, block: dict[str, object], new_events: list[dict[str, object]]) -> None:
        """Begin a content block, unless the open block has this type."""
        if self._is_block_open and self._blocks[-1]["type"] == block["type"]:
            return
        new_events += self._close()
        self._blocks.append(block)
        self._is_block_open = True
        new_events.append(
            {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}
        )

    def _close(self) -> list[dict[str, object]]:
        """End the open content block, if any. Return the stream events for it."""
        if not self._is_block_open:
            return []
        self._is_block_open = False
        block, text, new_events = self._blocks[-1], "".join(self._text_parts), []
        self._text_parts.clear()
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                block |= {"thinking": text, "signature": THINKING_SIGNATURE}
                new_events.append(self._delta(type="signature_delta", signature=THINKING_SIGNATURE))
            case _:
                block["input"] = _tool_input(text)
        return [*new_events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, **delta: object) -> dict[str, object]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


_ZERO_CACHE_USAGE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _usage(usage: Usage) -> dict[str, object]:
    """Return the usage in Anthropic's format. Its ``input_tokens`` excludes tokens read from the cache."""
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": usage["completion_tokens"],
    }


def _tool_input(arguments: str) -> dict[str, object]:
    """Return the input of a tool call; an empty dict if ``arguments`` is not a complete JSON object."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
