"""What both routes of text do with a request around the words of its own."""

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
    """Makes the objects of an answer: `ChatResponse`, `CompletionResponse`."""

    def whole(self, pieces: list[ChoiceDelta], usage: dict[str, Any]) -> Iterable[bytes]: ...

    def events(
        self, index: int, piece: ChoiceDelta, usage: dict[str, Any] | None = None
    ) -> Iterable[bytes]: ...

    def usage(self, usage: dict[str, Any]) -> bytes: ...


def checked_body(services: Services, kind: type[Body], raw: Any) -> Body:
    """Return a body whose every field is one that we know what to do with.

    An absent ``model`` is the one that is served.

    Raises:
        RequestProblem: 400 that names the field.
    """
    if issubclass(kind, GenerationBody) and isinstance(raw, dict) and raw.get("model") is None:
        raw = {**raw, "model": services.model_name}
    body = validated(kind, raw)
    UnknownFields(services.config.unknown_fields == "error", services.log).check(body)
    if isinstance(body, GenerationBody):
        check_combinations(body)
    return body


def note(body: GenerationBody, record: RequestRecord, context: TextContext) -> None:
    """Writes into the record what only the log is to know."""
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
    """What all objects of an answer have in common."""
    return Envelope(
        id=request_id,
        created=int(time.time()),
        model=body.model,
        system_fingerprint=system_fingerprint(services),
    )


async def answer_request(
    request: Request, services: Services, body: GenerationBody, work: GenerationJob, answer: ResponseBuilder
) -> Response:
    """Runs a request's choices. The response's headers go out after all were admitted, so that whatever is
    refused is refused by its status, and never in a stream that began with 200.

    Raises:
        PenstockError: the worker refuses the request, or it failed.
        ClientDisconnect: the client has left; its choices are cancelled.
    """
    record = RequestRecord.of(request)
    run = GenerationRun(services, record, work)
    if body.stream:
        try:
            await cancel_on_disconnect(request, run, run.admitted)
        except BaseException:
            run.finish()
            raise
        return EventStream(
            _stream(run, answer, body, services.turns),
            on_error=lambda error: _note_error(services, record, error),
            on_disconnect=run.cancel,
        )

    async def whole() -> list[bytes]:
        await run.admitted()
        pieces = await run.whole()
        return await gather(answer.whole(pieces, run.usage()), services.turns)

    async with run:
        parts = await cancel_on_disconnect(request, run, whole)
    return JsonResponse(parts)


async def _stream(
    run: GenerationRun, answer: ResponseBuilder, body: GenerationBody, turns: Turns
) -> AsyncGenerator[bytes, None]:
    tells_usage = body.tells_usage_so_far
    async with run, aclosing(run.deltas()) as deltas:
        async for item in deltas:
            if item is None:
                yield PING
                continue
            index, piece = item
            events = answer.events(index, piece, run.usage() if tells_usage else None)
            async for part in spread(events, turns):
                yield part
        yield (answer.usage(run.usage()) if body.includes_usage else b"") + DONE


def _note_error(services: Services, record: RequestRecord, error: BaseException) -> None:
    problem = problem_of(error)
    record.failed(problem.code, problem.status)
    if problem.status == 500:
        services.log.error("a stream broke", exc_info=error, extra={"fields": {"id": record.request_id}})
