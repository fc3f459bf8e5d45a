"""Runs background responses independently of connections, and holds the state of the Responses API."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from penstock.serve.api.responses.response_builder import ResponseBuilder
from penstock.serve.api.responses.response_request import PreparedResponse
from penstock.serve.api.responses.response_run import Pool, ResponseRun
from penstock.serve.api.responses.response_store import ResponseStore
from penstock.serve.api.text_generation import record_error, response_events
from penstock.serve.http.problems import problem_of
from penstock.serve.observability.access_log import log_request
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services

MAX_ENDED_RUNS = 64
"""Maximum number of finished background responses whose events are kept when a new response is added."""


class ResponseState:
    """The state that the routes of the Responses API share."""

    def __init__(self, state_dir: str | None, store_size: int) -> None:
        path = None if state_dir is None else Path(state_dir).expanduser() / "responses.sqlite3"
        self.store = ResponseStore(path, store_size)
        self.runs: OrderedDict[str, BackgroundRun] = OrderedDict()
        """The running background responses and the newest finished ones, see `add`."""

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def add(self, run: BackgroundRun) -> None:
        """Add a run. Remove the oldest finished runs, so that at most `MAX_ENDED_RUNS` of them remain."""
        self.runs[run.response_id] = run
        finished_ids = [response_id for response_id, other_run in self.runs.items() if other_run.is_done]
        for response_id in finished_ids[: max(0, len(finished_ids) - MAX_ENDED_RUNS)]:
            del self.runs[response_id]


class BackgroundRun:
    """A response that is generated in an asyncio task, independent of the client's connection.

    Args:
        services: the objects that routes use.
        state: stores the response.
        owner: the owner of the response, as `request_owner` returns it.
        prepared_response: the prepared request.
        pool: runs the preparation of later turns.
        record: a request record for the task, for metrics and the access log.

    Raises:
        UnavailableError: the worker is not ready, or the queue is full.
    """

    def __init__(
        self,
        services: Services,
        state: ResponseState,
        owner: str,
        prepared_response: PreparedResponse,
        pool: Pool,
        record: RequestRecord,
    ) -> None:
        self.owner = owner
        self.response_id = prepared_response.conversation.context.request_id
        self._run = ResponseRun(services, record, prepared_response, pool)
        self.builder = ResponseBuilder(services, prepared_response, self._run)
        self.keeps_events = bool(prepared_response.body.stream)
        self.is_done = False
        self.builder.set_status("queued")
        self._services = services
        self._state = state
        self._items = prepared_response.items
        self._record = record
        self._events: list[bytes] = []
        self._change_event = asyncio.Event()
        self._is_cancelled = False
        self._task = asyncio.ensure_future(self._generate())

    async def put(self) -> None:
        """Write the response in its current state to the store."""
        output = self.builder.result["output"]
        assert isinstance(output, list)
        result = {**self.builder.result, "output": [*output]}
        await self._state.store.put(self.owner, result, self._items, is_done=self.is_done)

    async def cancel(self) -> dict[str, object]:
        """Cancel the generation if it is running, and return the response."""
        if not self.is_done:
            self._is_cancelled = True
            self._run.cancel()
            await asyncio.wait((self._task,))
        return self.builder.result

    async def events(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events with a sequence number above `after`.

        Waits for new events until the response ends. There are no events unless the request that created the
        response has set ``stream``.
        """
        position = after + 1
        while True:
            change_event = self._change_event
            if position < len(self._events):
                yield b"".join(self._events[position:])
                position = len(self._events)
            elif self.is_done:
                return
            else:
                await change_event.wait()

    async def _generate(self) -> None:
        services, builder = self._services, self.builder
        with services.gate.track():
            try:
                await self._run.admitted()
                builder.set_status("in_progress")
                async with aclosing(response_events(self._run, builder, services.encoding_turns)) as events:
                    async for encoded_event in events:
                        if self._is_cancelled:
                            break
                        self._publish(encoded_event)
            except Exception as error:
                record_error(services, self._record, error)
                builder.end_with_error(problem_of(error))
                if not self._is_cancelled:
                    self._publish(builder.error(problem_of(error)))
            finally:
                self._run.finish()
            if self._is_cancelled:
                builder.end_as_cancelled()
            self.is_done = True
            await self.put()
            self._notify_readers()
            self._record.ended_at = time.perf_counter()
            self._record.status = 200
            if services.config.access_log:
                log_request(self._record)

    def _publish(self, events: bytes) -> None:
        """Append encoded events to the event list. The index of an event is its sequence number.

        Does nothing for a ping, or if the request has not set ``stream``.
        """
        if self.keeps_events and events.startswith(b"event:"):
            self._events += [event + b"\n\n" for event in events.split(b"\n\n") if event]
            self._notify_readers()

    def _notify_readers(self) -> None:
        self._change_event.set()
        self._change_event = asyncio.Event()
