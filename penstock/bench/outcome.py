"""The outcome of one request: times and number of its tokens, or its error."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from penstock.bench.http_client import HttpResponse


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times are those of ``time.perf_counter``."""

    index: int
    scheduled: float
    """When the request was due. Latencies count from here and include delays of this client."""
    sent: float = 0.0
    ended: float = 0.0
    text_times: list[float] = field(default_factory=list)
    """Arrival times of the stream events with text; an event may hold several tokens."""
    prompt_tokens: int = 0
    """From the server's ``usage``, as the next two fields."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    """The kind of error; equal errors have equal text."""
    detail: str = ""
    """The server's error message."""

    @property
    def seconds(self) -> float:
        """Seconds from the due time to the end."""
        return self.ended - self.scheduled

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from the due time to the first text; None without streaming."""
        return self.text_times[0] - self.scheduled if self.text_times else None

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds of a token after the first; None for one token, or without streaming."""
        if self.completion_tokens < 2 or not self.text_times:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.completion_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive events with text."""
        return [after - before for before, after in pairwise(self.text_times)]

    def failed(self, kind: str, detail: str = "") -> None:
        """Record an error, if none is recorded yet."""
        if self.error is None:
            self.error, self.detail = kind, detail[:500]


# The parts of server responses that are read. -------------------------------------------------------------


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


class _Object(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Object).decode


def read_response(outcome: Outcome, answer: HttpResponse) -> None:
    """Read a response, or its error, into an outcome."""
    if answer.status != 200:
        error = _error_of(answer.body)
        outcome.failed(f"HTTP {answer.status}{_in_brackets(error)}", _message_of(error))
        return
    try:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            _read_stream(outcome, answer)
        else:
            _read_object(outcome, _decode(answer.body))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        outcome.failed("unreadable response", str(error))
        return
    if outcome.error is None and not outcome.prompt_tokens:
        outcome.failed("no usage", "the response has no token counts")


def events_of(pieces: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Return the data of a stream's events, each with the time when it was complete.

    >>> events_of([(1.0, b"data: a\\n"), (2.0, b"\\ndata: b\\r\\n\\r\\n: ping\\n\\n")])
    [(2.0, b'a'), (2.0, b'b')]
    """
    events, rest = [], b""
    for when, piece in pieces:
        *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                events.append((when, b"\n".join(lines)))
    return events


def _read_stream(outcome: Outcome, answer: HttpResponse) -> None:
    is_complete = False
    for when, data in events_of(answer.pieces):
        if data == b"[DONE]":
            is_complete = True
            continue
        one = _decode(data)
        if any(choice.has_text for choice in one.choices):
            outcome.text_times.append(when)
        _read_object(outcome, one)
    if not is_complete:
        outcome.failed("stream without [DONE]")


def _read_object(outcome: Outcome, one: _Object) -> None:
    if one.error is not None:
        outcome.failed(f"error in the response{_in_brackets(one.error)}", _message_of(one.error))
    if one.usage is not None:
        details = one.usage.prompt_tokens_details
        outcome.prompt_tokens = one.usage.prompt_tokens
        outcome.completion_tokens = one.usage.completion_tokens
        outcome.cached_tokens = (details.cached_tokens or 0) if details else 0


def _error_of(body: bytes) -> object:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode(errors="replace")
    return value.get("error", value) if isinstance(value, dict) else value


def _in_brackets(error: object) -> str:
    code = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
    return f" ({code})" if code else ""


def _message_of(error: object) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
