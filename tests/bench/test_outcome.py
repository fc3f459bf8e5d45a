"""Responses read by the load generator, and the figures computed from them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.http_client import HttpResponse
from penstock.bench.load import Measurement
from penstock.bench.outcome import Outcome, parse_events, read_response
from penstock.bench.summary import Summary, build_report

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8"}


def content_event(text: str | None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], **fields}).encode() + b"\n\n"


LAST_EVENTS = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n"


def read_stream_outcome(*chunks: tuple[float, bytes]) -> Outcome:
    return read_response_outcome(HttpResponse(200, dict(SSE_HEADERS), list(chunks)))


def read_response_outcome(response: HttpResponse) -> Outcome:
    outcome = Outcome(0, scheduled_time=1.0, sent_time=1.5, end_time=9.0)
    read_response(outcome, response)
    return outcome


def test_latencies_of_a_stream_follow_from_its_event_times() -> None:
    outcome = read_stream_outcome(
        (2.0, content_event("")),  # an event with empty text, like the first event of most streams
        (3.0, content_event("He") + b": ping\n\n"),
        (3.5, b": ping\n\n"),
        (5.0, content_event("llo") + content_event(" you")),
        (6.0, content_event(None, usage=None)),
        (7.0, LAST_EVENTS),
    )
    assert outcome.error is None
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (7, 5, 3)
    assert outcome.first_token_seconds == 2.0  # from the scheduled time 1.0 to the first text at 3.0
    assert outcome.gaps == [2.0, 0.0]
    assert outcome.token_seconds == 0.5  # the four tokens after the first token take 2 s
    assert outcome.seconds == 8.0


def test_the_number_of_tokens_is_read_from_usage() -> None:
    outcome = read_stream_outcome((2.0, content_event("a")), (3.0, content_event("b")), (4.0, LAST_EVENTS))
    assert outcome.completion_tokens == 5


@pytest.mark.parametrize(
    "delta", [{"reasoning_content": "a"}, {"tool_calls": [{"index": 0}]}, {"reasoning": "a"}]
)
def test_reasoning_and_tool_call_fields_count_as_text(delta: dict[str, Any]) -> None:
    data = json.dumps({"choices": [{"index": 0, "delta": delta}], "usage": USAGE}).encode()
    outcome = read_stream_outcome((2.0, b"data: " + data + b"\n\ndata: [DONE]\n\n"))
    assert (outcome.text_times, outcome.error) == ([2.0], None)


@given(st.integers(1, 30), st.booleans())
def test_events_do_not_depend_on_the_chunks_of_the_stream(size: int, has_carriage_returns: bool) -> None:
    text = b"data: a\n\n: ping\n\nevent: x\ndata:b\ndata: c\n\ndata: d\n\n"
    if has_carriage_returns:
        text = text.replace(b"\n", b"\r\n")
    chunks = [(float(start), text[start : start + size]) for start in range(0, len(text), size)]
    assert [data for _, data in parse_events(chunks)] == [b"a", b"b\nc", b"d"]


@pytest.mark.parametrize(
    ("response", "error", "detail"),
    [
        (
            HttpResponse(429, {}, [(1.0, b'{"error": {"message": "wait", "code": "rate"}}')]),
            "HTTP 429 (rate)",
            "wait",
        ),
        (HttpResponse(500, {}, [(1.0, b"<html>")]), "HTTP 500", "<html>"),
        (HttpResponse(400, {}, [(1.0, b'{"object": "error", "message": "no"}')]), "HTTP 400", "no"),
        (HttpResponse(200, {}, [(1.0, b"{")]), "unreadable response", "truncated"),
        (HttpResponse(200, {}, [(1.0, b'{"choices": []}')]), "no usage", "no token counts"),
        (HttpResponse(200, SSE_HEADERS, [(1.0, content_event("a"))]), "stream without [DONE]", ""),
        (
            HttpResponse(
                200,
                SSE_HEADERS,
                [(1.0, content_event("a") + b'data: {"error": {"message": "m", "type": "t"}}\n\n')],
            ),
            "error in the response (t)",
            "m",
        ),
    ],
)
def test_errors_are_classified(response: HttpResponse, error: str, detail: str) -> None:
    outcome = read_response_outcome(response)
    assert outcome.error == error
    assert detail in outcome.detail


def test_a_summary_counts_successful_and_failed_requests() -> None:
    successful_outcomes = [
        Outcome(
            index, float(index), float(index), index + 10.0, [index + 2.0, index + 4.0, index + 8.0], 10, 2, 4
        )
        for index in range(100)
    ]
    failed_outcomes = [Outcome(200, 0.0, end_time=1.0, error="timeout", detail="first")] * 2
    failed_outcomes.append(
        Outcome(201, 0.0, 0.0, 1.0, [0.1, 0.9], prompt_tokens=9, completion_tokens=9, error="HTTP 500")
    )
    result = Measurement([*successful_outcomes, *failed_outcomes], start_time=0.0, end_time=50.0)
    summary = Summary.from_measurement(result)
    assert (summary.requests, summary.completed) == (103, 100)
    assert summary.errors == {"timeout": 2, "HTTP 500": 1}
    assert summary.error_details["timeout"] == "first"
    assert summary.completion_tokens == 400
    assert summary.completion_tokens_per_second == 8.0
    assert summary.prompt_tokens_per_second == 20.0
    assert summary.cached_tokens == 200
    assert summary.requests_per_second == 2.0
    latencies = summary.latencies()
    assert latencies["time to first token"].percentiles == {"p50": 2, "p90": 2, "p95": 2, "p99": 2}
    assert latencies["end to end"].mean == 10.0
    assert latencies["time per token"].mean == 2.0
    assert (latencies["inter-token"].count, latencies["inter-token"].mean) == (200, 3.0)
    report = json.loads(json.dumps(build_report(result, {"url": "x"})))
    assert len(report["requests"]) == 103
    assert report["summary"]["end_to_end"]["percentiles"]["p99"] == 10.0
    assert report["requests"][100]["error"] == "timeout"


def test_a_summary_without_successful_requests_has_no_latencies() -> None:
    summary = Summary.from_measurement(Measurement([Outcome(0, 0.0, error="no connection")], 0.0, 0.0))
    assert summary.latencies() == {}
    assert summary.completion_tokens_per_second == 0.0
