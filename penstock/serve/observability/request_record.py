"""What is known of a request besides its answer: what the log line, the metrics and the spans are made of.

The middleware makes a record when a request arrives (``request.state.record``), the routes fill it, and at
the request's end the middleware logs it. It holds nothing of the prompt and nothing of the answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request


class RecordObserver(Protocol):
    """Whoever wants to know at once: the metrics of a request, its span."""

    def admitted(self, record: RequestRecord) -> None:
        """The scheduler has given the request a place in the batch."""

    def tokens(self, record: RequestRecord, count: int, seconds: float | None) -> None:
        """``count`` tokens came, ``seconds`` after those before them; None for a choice's first."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. Times are those of ``time.perf_counter``.

    Routes set the fields from ``model`` on and call `admitted` and `tokens`; everything has a default, so a
    record by itself does for tests.
    """

    request_id: str = ""
    method: str = "POST"
    route: str = ""
    """The route's template, such as ``/v1/models/{id}``; the same for every request that it serves."""
    received: float = field(default_factory=time.perf_counter)
    client_id: str = ""
    """Who sent it: the number of an API key, or a connection. Clients share the batch evenly."""

    model: str | None = None
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    """One a choice, as the answer has them."""
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """More for the log line, such as a seed that was drawn: name -> plain value."""
    error_code: str | None = None
    """The code of the problem that ended the request, also where a stream had begun."""
    error_status: int | None = None
    """The status that the problem would have had, where a stream had begun."""

    status: int | None = None
    """The status code that was sent; None where none was."""
    client_left: bool = False
    """Whether the client went away before the end."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    observers: list[RecordObserver] = field(default_factory=list)
    _last_token_at: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> RequestRecord:
        """The record that the middleware made for a request."""
        record = request.state.record
        assert isinstance(record, cls)
        return record

    def admitted(self) -> None:
        """The scheduler has given the request, or the first of its choices, a place in the batch."""
        if self.admitted_at is None:
            self.admitted_at = time.perf_counter()
            for observer in self.observers:
                observer.admitted(self)

    def tokens(self, count: int, choice: int = 0) -> None:
        """``count`` new tokens have come from the worker for a choice, before they are made into text."""
        if count <= 0:
            return
        now = time.perf_counter()
        if self.first_token_at is None:
            self.first_token_at = now
        before = self._last_token_at.get(choice)
        self._last_token_at[choice] = now
        for observer in self.observers:
            observer.tokens(self, count, None if before is None else now - before)

    def failed(self, code: str | None, status: int) -> None:
        """A problem has ended the request; also called when a stream has begun."""
        self.error_code = code
        self.error_status = status

    @property
    def outcome(self) -> str:
        """How it ended: finish reasons, ``abort:client_disconnect``, ``error:<code>``, or ``-``."""
        if self.client_left:
            return "abort:client_disconnect"
        if self.error_status is not None:
            return f"error:{self.error_code or self.error_status}"
        return ",".join(self.finish_reasons) or "-"

    @property
    def final_status(self) -> int:
        """The status that says how it ended: 499 where the client left, an error's where a stream broke."""
        if self.client_left:
            return 499
        return self.error_status or self.status or 500

    def seconds_until(self, moment: float | None) -> float | None:
        """From the request's arrival to a moment."""
        return None if moment is None else moment - self.received
