"""`Outcome`: the times and token counts of one request, or its error."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from penstock.bench.http_client import HttpResponse


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times are in seconds of ``time.perf_counter``."""

    index: int
    scheduled_time: float
    """The time when the request was due. Latencies are measured from this time, so they include delays of the
    client."""
    sent_time: float = 0.0
    end_time: float = 0.0
    text_times: list[float] = field(default_factory=list)
    """The arrival times of the stream events with text or tool calls. An event can contain several tokens."""
    prompt_tokens: int = 0
    """Number of prompt tokens in the server's ``usage``."""
    cached_tokens: int = 0
    """Number of prompt tokens from the prefix cache in the server's ``usage``."""
    completion_tokens: int = 0
    """Number of generated tokens in the server's ``usage``."""
    error: str | None = None
    """The kind of error; None for a successful request. Errors of the same kind have the same text."""
    detail: str = ""
    """The error message, at most 500 characters."""

    @property
    def seconds(self) -> float:
        """Seconds from the due time to the end."""
        return self.end_time - self.scheduled_time

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from the due time to the first text; None without text or without streaming."""
        return self.text_times[0] - self.scheduled_time if self.text_times else None

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds per token after the first; None for fewer than two tokens, or without streaming."""
        if self.completion_tokens < 2 or not self.text_times:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.completion_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive events with text."""
        return [next_time - previous_time for previous_time, next_time in pairwise(self.text_times)]

    def record_error(self, kind: str, detail: str = "") -> None:
        """Record the first error of a request. Later errors are ignored."""
        if self.error is None:
            self.error, self.detail = kind, detail[:500]


# The fields of server responses that are read. ---------------------------------------------------


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[object] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _ResponseObject(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_ResponseObject).decode


def read_response(outcome: Outcome, answer: HttpResponse) -> None:
    """Record the tokens or the error of a response in an outcome."""
    if answer.status != 200:
        error = _response_error(answer.body)
        outcome.record_error(f"HTTP {answer.status}{_error_code_suffix(error)}", _error_message(error))
        return
    try:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            _read_stream(outcome, answer)
        else:
            _record_usage(outcome, _decode(answer.body))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        outcome.record_error("unreadable response", str(error))
        return
    if outcome.error is None and not outcome.prompt_tokens:
        outcome.record_error("no usage", "the response has no token counts")


def parse_events(pieces: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Return the data of the events of a stream, each with the time when the event was complete.

    >>> parse_events([(1.0, b"data: a\\n"), (2.0, b"\\ndata: b\\r\\n\\r\\n: ping\\n\\n")])
    [(2.0, b'a'), (2.0, b'b')]
    """
    events, incomplete_event = [], b""
    for arrival_time, piece in pieces:
        *complete_events, incomplete_event = (incomplete_event + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in complete_events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                events.append((arrival_time, b"\n".join(lines)))
    return events


def _read_stream(outcome: Outcome, answer: HttpResponse) -> None:
    is_complete = False
    for arrival_time, data in parse_events(answer.pieces):
        if data == b"[DONE]":
            is_complete = True
            continue
        event = _decode(data)
        if any(choice.has_text for choice in event.choices):
            outcome.text_times.append(arrival_time)
        _record_usage(outcome, event)
    if not is_complete:
        outcome.record_error("stream without [DONE]")


def _record_usage(outcome: Outcome, response: _ResponseObject) -> None:
    if response.error is not None:
        outcome.record_error(
            f"error in the response{_error_code_suffix(response.error)}", _error_message(response.error)
        )
    if response.usage is not None:
        details = response.usage.prompt_tokens_details
        outcome.prompt_tokens = response.usage.prompt_tokens
        outcome.completion_tokens = response.usage.completion_tokens
        outcome.cached_tokens = (details.cached_tokens or 0) if details else 0


def _response_error(body: bytes) -> object:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode(errors="replace")
    return value.get("error", value) if isinstance(value, dict) else value


def _error_code_suffix(error: object) -> str:
    code = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
    return f" ({code})" if code else ""


def _error_message(error: object) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
