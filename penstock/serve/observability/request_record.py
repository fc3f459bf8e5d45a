"""The record of a request, from which the log line, the metrics and the span are written.

The middleware creates a record when a request arrives (``request.state.record``), the routes fill it, and the
middleware logs it at the end. A record contains no text of the prompt or the response.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request


class RecordObserver(Protocol):
    """Receives the events of a request; `RequestMetrics` and `RequestSpan` are observers."""

    def admitted(self, record: RequestRecord) -> None:
        """Called when the scheduler admits the first choice of the request."""

    def tokens(self, record: RequestRecord, count: int, seconds: float | None) -> None:
        """Called when a choice has ``count`` new tokens.

        ``seconds`` is the time since the previous tokens of the choice; None for its first tokens.
        """


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The data of one request. Times are values of ``time.perf_counter``.

    Routes set the fields from ``model`` to ``details``, and call the methods that record events.
    """

    request_id: str = ""
    method: str = "POST"
    route: str = ""
    """The template of the route, such as ``/v1/models/{id}``."""
    received_at: float = field(default_factory=time.perf_counter)
    client_id: str = ""
    """Identifies the client by its API key or its address.

    The scheduler divides the batch evenly among clients.
    """
    header_session_id: str = ""
    """The session id in the request's headers; "" if there is none."""

    model: str | None = None
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    """The finish reasons of the choices that have one, as in the response."""
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    details: dict[str, object] = field(default_factory=dict)
    """Additional fields of the log line, such as a random seed: name -> JSON value."""
    error_code: str | None = None
    """The code of the error that ended the request, before or after the start of a stream."""
    error_status: int | None = None
    """The status code of the error that ended the request. It is not sent if a response has started."""

    status: int | None = None
    """The status code that was sent; None before the response starts."""
    client_left: bool = False
    """Whether the client disconnected before the end of the response."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    first_audio_at: float | None = None
    last_audio_at: float | None = None
    audio_seconds: float = 0.0
    """The duration of the generated audio."""
    observers: list[RecordObserver] = field(default_factory=list)
    _last_token_at: dict[int, float] = field(default_factory=dict)
    """Index of a choice -> time of its last tokens."""

    @classmethod
    def of(cls, request: Request) -> RequestRecord:
        """Return the record that the middleware created for a request."""
        record = request.state.record
        assert isinstance(record, cls)
        return record

    @property
    def session_id(self) -> str:
        """The session of the request: `header_session_id`, else `user`, else ""."""
        return self.header_session_id or self.user or ""

    def admitted(self) -> None:
        """Record the first admission of one of the request's choices."""
        if self.admitted_at is None:
            self.admitted_at = time.perf_counter()
            for observer in self.observers:
                observer.admitted(self)

    def tokens(self, count: int, choice: int = 0) -> None:
        """Record ``count`` new tokens from the worker for a choice. Does nothing unless ``count`` > 0."""
        if count <= 0:
            return
        now = time.perf_counter()
        if self.first_token_at is None:
            self.first_token_at = now
        previous_token_at = self._last_token_at.get(choice)
        self._last_token_at[choice] = now
        for observer in self.observers:
            observer.tokens(self, count, None if previous_token_at is None else now - previous_token_at)

    def pause(self) -> None:
        """Record a pause of the generation. The time until the next tokens is not an inter-token time."""
        self._last_token_at.clear()

    def audio(self, seconds: float) -> None:
        """Record ``seconds`` of new audio."""
        self.last_audio_at = time.perf_counter()
        if self.first_audio_at is None:
            self.first_audio_at = self.last_audio_at
        self.audio_seconds += seconds

    def failed(self, code: str | None, status: int) -> None:
        """Record the error that ended the request, before or after the start of a stream."""
        self.error_code = code
        self.error_status = status

    @property
    def outcome(self) -> str:
        """``abort:client_disconnect`` or ``error:<code or status>``, else the finish reasons, else ``-``."""
        if self.client_left:
            return "abort:client_disconnect"
        if self.error_status is not None:
            return f"error:{self.error_code or self.error_status}"
        return ",".join(self.finish_reasons) or "-"

    @property
    def final_status(self) -> int:
        """The status code for log and metrics.

        499 after a disconnect, else the status of the error, else the status that was sent, else 500.
        """
        if self.client_left:
            return 499
        return self.error_status or self.status or 500

    def seconds_until(self, moment: float | None) -> float | None:
        """Return the seconds from the request's arrival to ``moment``; None if ``moment`` is None."""
        return None if moment is None else moment - self.received_at
