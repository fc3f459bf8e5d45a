"""Load generation in closed and open loops, against a server whose responses the test controls."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest

from penstock.bench.http_client import HttpClient, HttpResponse, IncompleteResponseError
from penstock.bench.load import INTERRUPTED, Load, Measurement, measure, round_trips
from penstock.bench.summary import Summary

COMPLETION = b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}'


class FakeClient(HttpClient):
    """A client whose server responds after a fixed time."""

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__("http://nowhere")
        self.seconds = seconds
        self.num_active = self.max_active = 0
        self.indices: list[int] = []
        self.num_served = self.num_round_trips = 0
        self.stop: tuple[int, asyncio.Event] | None = None
        """A number of responses, and the event that is set after this number."""

    async def post(self, path: str, body: Any) -> HttpResponse:
        assert path == "/v1/completions"
        self.indices.append(body["index"])
        self.num_active += 1
        self.max_active = max(self.max_active, self.num_active)
        try:
            await asyncio.sleep(self.seconds)
            if "error" in body:
                raise body["error"]
            self.num_served += 1
            if self.stop is not None and self.num_served == self.stop[0]:
                self.stop[1].set()
            return HttpResponse(200, {}, [(time.perf_counter(), COMPLETION)])
        finally:
            self.num_active -= 1

    async def get(self, path: str) -> HttpResponse:
        self.num_round_trips += 1
        if self.num_round_trips > 7:
            raise ConnectionResetError
        await asyncio.sleep(self.seconds)
        return HttpResponse(200)


def make_bodies(count: int) -> list[dict[str, Any]]:
    return [{"index": index} for index in range(count)]


async def run_load(
    client: FakeClient, bodies: list[dict[str, Any]], stop: asyncio.Event | None = None, **load: Any
) -> Any:
    return await measure(client, "/v1/completions", bodies, Load(**load), stop=stop)


async def test_a_closed_loop_keeps_its_concurrency() -> None:
    client = FakeClient()
    result = await run_load(client, make_bodies(20), concurrency=4)
    assert client.max_active == 4
    assert client.indices == list(range(20))
    assert [outcome.error for outcome in result.outcomes] == [None] * 20
    assert not result.is_interrupted
    assert result.seconds >= 5 * 0.01


async def test_an_open_loop_does_not_wait_for_responses_and_its_times_depend_on_the_seed() -> None:
    client = FakeClient(seconds=0.3)
    result = await run_load(client, make_bodies(30), rate=300.0, seed=3)
    assert client.max_active > 10
    scheduled_times = [outcome.scheduled_time - result.start_time for outcome in result.outcomes]
    assert scheduled_times == sorted(scheduled_times)
    repeated_result = await run_load(FakeClient(0.0), make_bodies(30), rate=300.0, seed=3)
    assert [
        outcome.scheduled_time - repeated_result.start_time for outcome in repeated_result.outcomes
    ] == pytest.approx(scheduled_times)
    other_result = await run_load(FakeClient(0.0), make_bodies(30), rate=300.0, seed=4)
    assert other_result.outcomes[-1].scheduled_time - other_result.start_time != pytest.approx(
        scheduled_times[-1]
    )


async def test_arrivals_are_a_poisson_process() -> None:
    result = await run_load(FakeClient(0.0), make_bodies(2000), rate=20_000.0)
    scheduled_times = [outcome.scheduled_time for outcome in result.outcomes]
    gaps = [20_000 * (b - a) for a, b in pairwise(scheduled_times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1, abs=0.1)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(1, abs=0.25)


async def test_latencies_include_delays_of_the_client() -> None:
    """Latencies start at the scheduled time, so they include the wait while two other requests run.

    Otherwise slow responses would reduce the measured load (coordinated omission).
    """
    client = FakeClient(seconds=0.05)
    result = await run_load(client, make_bodies(10), rate=10_000.0, concurrency=2)
    assert client.max_active == 2
    assert max(outcome.seconds for outcome in result.outcomes) >= 5 * 0.05
    last_outcome = max(result.outcomes, key=lambda outcome: outcome.sent_time)
    assert last_outcome.sent_time - last_outcome.scheduled_time >= 3 * 0.05


async def test_errors_are_counted_by_kind() -> None:
    client = FakeClient()
    errors = [IncompleteResponseError("cut"), ConnectionRefusedError("no"), IncompleteResponseError("cut")]
    result = await run_load(
        client, [*make_bodies(2), *({"index": 2, "error": error} for error in errors)], concurrency=2
    )
    assert Summary.from_measurement(result).errors == {"broken connection": 2, "no connection": 1}
    client.seconds = 5
    result = await run_load(client, make_bodies(2), concurrency=2, timeout=0.05)
    assert Summary.from_measurement(result).errors == {"timeout": 2}


@pytest.mark.parametrize("load", [{"concurrency": 3}, {"rate": 1000.0}])
async def test_an_interrupted_run_keeps_finished_requests(load: dict[str, Any]) -> None:
    client, stop = FakeClient(seconds=0.02), asyncio.Event()
    client.stop = 10, stop
    result = await run_load(client, make_bodies(10_000), stop, **load)
    assert result.is_interrupted
    assert client.num_active == 0
    summary = Summary.from_measurement(result)
    assert 0 < summary.completed < 10_000
    assert set(summary.errors) <= {INTERRUPTED}
    if "concurrency" in load:
        assert summary.requests == len(client.indices)
    else:
        assert summary.completed < summary.requests <= len(client.indices)


async def test_an_exception_in_the_client_is_not_a_server_error() -> None:
    with pytest.raises(ZeroDivisionError):
        await run_load(FakeClient(), [{"index": 0, "error": ZeroDivisionError()}], concurrency=1)


async def test_round_trips_exclude_the_first_request_of_the_connection() -> None:
    result = await round_trips(FakeClient(), "/v1/models", 5)
    assert len(result) == 5
    assert min(result) >= 0.009
    summary = Summary.from_measurement(Measurement(round_trips=result))
    assert summary.latencies()["keep-alive"].count == 5
    assert len(await round_trips(FakeClient(), "/v1/models", 50)) == 6, "the server closed the connection"
    assert "keep-alive" not in Summary.from_measurement(Measurement()).latencies()
