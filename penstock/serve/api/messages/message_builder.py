"""Build a response of the Messages API: the whole message, or the events of a stream."""

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

SIGNATURE = "penstock"
"""The signature of all thinking blocks, which Anthropic's API requires. The server does not check it."""
_PING = named_event({"type": "ping"})


class MessageBuilder:
    """Builds the message or the events of one response.

    Args:
        body: the request.
        message_id: the id of the message.
        job: the running choice.
    """

    media_type = "text/event-stream"

    def __init__(self, body: MessagesBody, message_id: str, job: GenerationJob) -> None:
        self._body = body
        self._id = message_id
        self._choice = job.choices[0]
        self._num_prompt_tokens = job.num_prompt_tokens
        self._hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._blocks: list[dict[str, object]] = []
        self._open = False
        """Whether the last block is in progress."""
        self._pieces: list[str] = []
        """The text of the last block."""

    def whole(self, pieces: Sequence[ChoiceDelta], usage: Usage) -> Iterable[bytes]:
        """Yield the JSON of a message that is not streamed."""
        (piece,) = pieces
        self._add(piece.events)
        self._close()
        yield msgspec.json.encode(self._message(**self._end(), usage=_usage(usage), content=self._blocks))

    def begin(self) -> bytes:
        """Return the event that begins the message."""
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0} | _NO_CACHE
        message = self._message(stop_reason=None, stop_sequence=None, usage=usage, content=[])
        return named_event({"type": "message_start", "message": message})

    def events(self, index: int, piece: ChoiceDelta, usage: Usage | None = None) -> Iterable[bytes]:
        """Return the events of a delta."""
        return (b"".join(map(named_event, self._add(piece.events))),)

    def end(self, usage: Usage) -> bytes:
        """Return the events that end the message."""
        emitted = self._close()
        emitted.append({"type": "message_delta", "delta": self._end(), "usage": _usage(usage)})
        emitted.append({"type": "message_stop"})
        return b"".join(map(named_event, emitted))

    def ping(self) -> bytes:
        """Return the event that keeps a silent stream open."""
        return _PING

    def error(self, problem: Problem) -> bytes:
        """Return the event of an error that ends the stream."""
        return named_event(anthropic_error(problem))

    def _message(self, **more: object) -> dict[str, object]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._body.model, **more}

    def _end(self) -> dict[str, object]:
        """Return the reason why the message ended."""
        match self._choice.finish_reason:
            case "length":
                is_full = self._choice.num_tokens < self._body.max_tokens
                reason = "model_context_window_exceeded" if is_full else "max_tokens"
            case "tool_calls":
                reason = "tool_use"
            case _:
                reason = "end_turn" if self._choice.stop_match is None else "stop_sequence"
        stop = self._choice.stop_match if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop}

    def _add(self, events: Sequence[Event]) -> list[dict[str, object]]:
        """Add output to the blocks, and return the corresponding events."""
        emitted: list[dict[str, object]] = []
        for event in events:
            match event:
                case Content():
                    self._begin({"type": "text", "text": ""}, emitted)
                    self._pieces.append(event.text)
                    emitted.append(self._delta(type="text_delta", text=event.text))
                case Reasoning():
                    self._begin({"type": "thinking", "thinking": "", "signature": ""}, emitted)
                    if not self._hides_thinking:
                        self._pieces.append(event.text)
                        emitted.append(self._delta(type="thinking_delta", thinking=event.text))
                case ToolCallStart():
                    emitted += self._close()
                    self._begin(
                        {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}, emitted
                    )
                case ToolCallArguments():
                    self._pieces.append(event.text)
                    emitted.append(self._delta(type="input_json_delta", partial_json=event.text))
        return emitted

    def _begin(self, block: dict[str, object], emitted: list[dict[str, object]]) -> None:
        """Begin a block, unless one of this type is in progress."""
        if self._open and self._blocks[-1]["type"] == block["type"]:
            return
        emitted += self._close()
        self._blocks.append(block)
        self._open = True
        emitted.append(
            {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}
        )

    def _close(self) -> list[dict[str, object]]:
        """End the block that is in progress, if any."""
        if not self._open:
            return []
        self._open = False
        block, text, emitted = self._blocks[-1], "".join(self._pieces), []
        self._pieces.clear()
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                block |= {"thinking": text, "signature": SIGNATURE}
                emitted.append(self._delta(type="signature_delta", signature=SIGNATURE))
            case _:
                block["input"] = _input(text)
        return [*emitted, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, **delta: object) -> dict[str, object]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


_NO_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _usage(usage: Usage) -> dict[str, object]:
    """Return the usage; tokens that were read from the cache do not count as input tokens."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _input(arguments: str) -> dict[str, object]:
    """Return the input of a tool; empty if the output was cut within it."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
