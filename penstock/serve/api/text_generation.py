"""Functions that all routes of text generation share: they validate requests and send responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from types import TracebackType
from typing import Protocol, Self, TypeVar

from fastapi import Request, Response

from penstock.pipelines.core import TextContext
from penstock.serve.api.chat_response import Envelope
from penstock.serve.api.choice_decoder import ChoiceDelta
from penstock.serve.api.generation import cancel_on_disconnect
from penstock.serve.api.json_parts import EncodingTurns, JsonResponse, collect_parts, with_pauses
from penstock.serve.api.models import system_fingerprint
from penstock.serve.api.parameters import UndeclaredFieldChecker, check_combinations
from penstock.serve.api.schemas import GenerationBody, RequestBody
from penstock.serve.api.usage import Usage
from penstock.serve.api.validation import validated
from penstock.serve.http.problems import Problem, problem_of
from penstock.serve.http.sse import EventStream
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services

Body = TypeVar("Body", bound=RequestBody)


class ChoiceResponseBuilder(Protocol):
    """Builds the response of one API from the output: one object, or the events of a stream."""

    @property
    def media_type(self) -> str:
        """The content type of the stream."""
        ...

    def whole_response(self, outputs: list[ChoiceDelta], usage: Usage) -> Iterable[bytes]:
        """Yield the JSON of a response that is not streamed."""
        ...

    def begin(self) -> bytes:
        """Return the events before the first delta. May be empty."""
        ...

    def events(self, index: int, delta: ChoiceDelta, usage: Usage | None = None) -> Iterable[bytes]:
        """Return the events of a delta.

        `usage` includes the delta, and is set if each event must have the usage up to that event.
        """
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the events after the last delta."""
        ...

    def ping(self) -> bytes:
        """Return the bytes that are sent during a pause, so that proxies do not close the connection.

        Empty if the format of the stream has no such bytes.
        """
        ...

    def error(self, problem: Problem) -> bytes:
        """Return the error event that ends the stream."""
        ...


class ChoiceRun(Protocol):
    """Interface of an object that runs the choices of one request, such as `GenerationRun`."""

    async def admitted(self) -> None: ...

    def deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta] | None, None]: ...

    async def whole_output(self) -> list[ChoiceDelta]: ...

    def usage(self) -> Usage: ...

    def cancel(self) -> None: ...

    def finish(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def checked_body(services: Services, body_type: type[Body], raw: object) -> Body:
    """Validate a request body, including its unknown and unsupported fields, and return it.

    If ``model`` is absent and optional in the schema, it is set to the served model.

    Raises:
        RequestProblem: 400; the message names the invalid field.
    """
    model_field = body_type.model_fields.get("model")
    is_optional = model_field is not None and model_field.default == ""
    if is_optional and isinstance(raw, dict) and raw.get("model") is None:
        raw = {**raw, "model": services.model_name}
    body = validated(body_type, raw)
    UndeclaredFieldChecker(services.config.unknown_fields == "error", services.log).check(body)
    if isinstance(body, GenerationBody):
        check_combinations(body)
    return body


def record_logged_fields(body: GenerationBody, record: RequestRecord, context: TextContext) -> None:
    """Write the model, ``stream``, the context's id and seed, and the `LOGGED_FIELDS` into the record."""
    record.model = body.model
    record.stream = bool(body.stream)
    record.user = body.user
    record.safety_identifier = body.safety_identifier
    record.metadata = body.metadata
    record.details["completion"] = context.request_id
    record.details["seed"] = context.sampling_params.seed
    if body.prompt_cache_key is not None:
        record.details["prompt_cache_key"] = body.prompt_cache_key


def make_envelope(services: Services, request_id: str, body: GenerationBody) -> Envelope:
    """Return the members that all objects of a response share."""
    return Envelope(
        id=request_id,
        created=int(time.time()),
        model=body.model,
        system_fingerprint=system_fingerprint(services),
    )


async def answer_request(
    request: Request,
    services: Services,
    run: ChoiceRun,
    response: ChoiceResponseBuilder,
    *,
    stream: bool,
    with_usage: bool = False,
    on_complete: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """Run the choices of a request and return the HTTP response.

    The headers of a stream are sent after ``run.admitted()`` has returned. If the scheduler refuses a choice,
    the response therefore has an error status, and not an error event in a stream with status 200.

    Args:
        request: the HTTP request.
        services: the objects that routes use.
        run: the running choices.
        response: builds the response.
        stream: whether the response is streamed.
        with_usage: whether each event of a stream has the usage up to this event.
        on_complete: called when the response is complete, before its last part is sent.

    Raises:
        PenstockError: the worker refused the request, or the request failed.
        RequestProblem: 503; a time limit of the server was exceeded.
        ClientDisconnect: the client disconnected; the choices are cancelled.
    """
    record = RequestRecord.of(request)
    if stream:
        try:
            await cancel_on_disconnect(request, run, run.admitted)
        except BaseException:
            run.finish()
            raise
        return EventStream(
            response_events(
                run, response, services.encoding_turns, with_usage=with_usage, on_complete=on_complete
            ),
            on_error=lambda error: record_error(services, record, error),
            on_disconnect=run.cancel,
            error_event=response.error,
            media_type=response.media_type,
        )

    async def complete_response() -> list[bytes]:
        await run.admitted()
        outputs = await run.whole_output()
        parts = await collect_parts(response.whole_response(outputs, run.usage()), services.encoding_turns)
        if on_complete is not None:
            await on_complete()
        return parts

    async with run:
        parts = await cancel_on_disconnect(request, run, complete_response)
    return JsonResponse(parts)


async def response_events(
    run: ChoiceRun,
    response: ChoiceResponseBuilder,
    turns: EncodingTurns,
    *,
    with_usage: bool = False,
    on_complete: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a response as its output arrives.

    `answer_request` describes the arguments, and `EncodingTurns` describes ``turns``.
    """
    async with run, aclosing(run.deltas()) as deltas:
        if first_events := response.begin():
            yield first_events
        async for item in deltas:
            if item is None:
                if ping := response.ping():
                    yield ping
                continue
            index, delta = item
            events = response.events(index, delta, run.usage() if with_usage else None)
            async for part in with_pauses(events, turns):
                yield part
        last_events = response.end(run.usage())
        if on_complete is not None:
            await on_complete()
        yield last_events


def record_error(services: Services, record: RequestRecord, error: BaseException) -> None:
    """Write the error that ended a response into the request record. Log the error if its status is 500."""
    problem = problem_of(error)
    record.failed(problem.code, problem.status)
    if problem.status == 500:
        services.log.error("a stream has failed", exc_info=error, extra={"fields": {"id": record.request_id}})
