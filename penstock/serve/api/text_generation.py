"""The parts of request handling that chat and completions share."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response

from penstock.pipelines.core import TextContext
from penstock.serve.api.chat_response import Envelope
from penstock.serve.api.choice_decoder import ChoiceDelta
from penstock.serve.api.generation import GenerationJob, GenerationRun, cancel_on_disconnect
from penstock.serve.api.json_parts import JsonResponse, Turns, gather, spread
from penstock.serve.api.models import system_fingerprint
from penstock.serve.api.parameters import UnknownFields, check_combinations
from penstock.serve.api.schemas import GenerationBody, RequestBody
from penstock.serve.api.validation import validated
from penstock.serve.http.problems import problem_of
from penstock.serve.http.sse import DONE, PING, EventStream
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services

Body = TypeVar("Body", bound=RequestBody)


class ResponseBuilder(Protocol):
    """Builds the JSON of a response: `ChatResponse` or `CompletionResponse`."""

    def whole(self, pieces: list[ChoiceDelta], usage: dict[str, Any]) -> Iterable[bytes]: ...

    def events(
        self, index: int, piece: ChoiceDelta, usage: dict[str, Any] | None = None
    ) -> Iterable[bytes]: ...

    def usage(self, usage: dict[str, Any]) -> bytes: ...


def checked_body(services: Services, kind: type[Body], raw: Any) -> Body:
    """Validate a body and check all of its fields.

    If ``model`` is absent, it is set to the served model.

    Raises:
        RequestProblem: 400 that names the field.
    """
    model = kind.model_fields.get("model")
    has_default = model is not None and model.default == ""
    if has_default and isinstance(raw, dict) and raw.get("model") is None:
        raw = {**raw, "model": services.model_name}
    body = validated(kind, raw)
    UnknownFields(services.config.unknown_fields == "error", services.log).check(body)
    if isinstance(body, GenerationBody):
        check_combinations(body)
    return body


def note(body: GenerationBody, record: RequestRecord, context: TextContext) -> None:
    """Write the fields that appear only in the log into the record."""
    record.model = body.model
    record.stream = bool(body.stream)
    record.user = body.user
    record.safety_identifier = body.safety_identifier
    record.metadata = body.metadata
    record.details["completion"] = context.request_id
    record.details["seed"] = context.sampling_params.seed
    if body.prompt_cache_key is not None:
        record.details["prompt_cache_key"] = body.prompt_cache_key


def envelope_of(services: Services, request_id: str, body: GenerationBody) -> Envelope:
    """Return the members that all objects of a response share."""
    return Envelope(
        id=request_id,
        created=int(time.time()),
        model=body.model,
        system_fingerprint=system_fingerprint(services),
    )


async def answer_request(
    request: Request, services: Services, body: GenerationBody, job: GenerationJob, response: ResponseBuilder
) -> Response:
    """Run the choices of a request and return the HTTP response.

    The response headers are sent after all choices were admitted, so a refusal has its own status code
    instead of an error inside a stream with status 200.

    Raises:
        PenstockError: the worker refused the request, or the request failed.
        ClientDisconnect: the client disconnected; the choices are cancelled.
    """
    record = RequestRecord.of(request)
    run = GenerationRun(services, record, job)
    if body.stream:
        try:
            await cancel_on_disconnect(request, run, run.admitted)
        except BaseException:
            run.finish()
            raise
        return EventStream(
            _stream(run, response, body, services.turns),
            on_error=lambda error: _note_error(services, record, error),
            on_disconnect=run.cancel,
        )

    async def whole() -> list[bytes]:
        await run.admitted()
        pieces = await run.whole()
        return await gather(response.whole(pieces, run.usage()), services.turns)

    async with run:
        parts = await cancel_on_disconnect(request, run, whole)
    return JsonResponse(parts)


async def _stream(
    run: GenerationRun, response: ResponseBuilder, body: GenerationBody, turns: Turns
) -> AsyncGenerator[bytes, None]:
    has_usage = body.has_continuous_usage
    async with run, aclosing(run.deltas()) as deltas:
        async for item in deltas:
            if item is None:
                yield PING
                continue
            index, piece = item
            events = response.events(index, piece, run.usage() if has_usage else None)
            async for part in spread(events, turns):
                yield part
        yield (response.usage(run.usage()) if body.includes_usage else b"") + DONE


def _note_error(services: Services, record: RequestRecord, error: BaseException) -> None:
    problem = problem_of(error)
    record.failed(problem.code, problem.status)
    if problem.status == 500:
        services.log.error("a stream failed", exc_info=error, extra={"fields": {"id": record.request_id}})
