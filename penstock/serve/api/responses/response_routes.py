"""The routes ``/v1/responses``: create, retrieve, cancel and delete responses, list and count their input."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, cast

import msgspec
from fastapi import APIRouter, Query, Request, Response

from penstock.serve.api.generation import run_in_pool
from penstock.serve.api.owners import request_owner
from penstock.serve.api.responses.background import BackgroundRun, ResponseState
from penstock.serve.api.responses.offered_tools import find_offered_tools
from penstock.serve.api.responses.response_builder import ResponseBuilder
from penstock.serve.api.responses.response_request import PreparedResponse
from penstock.serve.api.responses.response_run import Pool, ResponseRun
from penstock.serve.api.responses.response_schema import ResponsesBody
from penstock.serve.api.responses.response_store import StoredResponse
from penstock.serve.api.text_generation import answer_request, record_error, record_logged_fields
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import responses, route_options
from penstock.serve.http.problems import RequestProblem
from penstock.serve.http.sse import EventStream
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services

router = APIRouter(route_class=JsonRoute, tags=["responses"])


@router.post("/v1/responses", **route_options(ResponsesBody, "The response, or its events with `stream`."))
async def create_response(request: Request) -> Response:
    """Generate a response to a text or to a list of items."""
    services, record = Services.of(request), RequestRecord.of(request)
    state, owner = open_state(services), request_owner(request)
    prepared_response = await _prepared_response(request, state, owner)
    services.warn_once(prepared_response.warnings)
    body, pool = prepared_response.body, cast("Pool", partial(run_in_pool, request))
    record_logged_fields(prepared_response.conversation.body, record, prepared_response.conversation.context)
    if body.background:
        background_record = RequestRecord(record.request_id, route="/v1/responses (background)")
        background_record.client_id = record.client_id
        background_record.header_session_id = record.header_session_id
        record_logged_fields(
            prepared_response.conversation.body, background_record, prepared_response.conversation.context
        )
        background_run = BackgroundRun(services, state, owner, prepared_response, pool, background_record)
        state.add(background_run)
        queued_response = msgspec.json.encode(background_run.builder.result)
        await background_run.put()
        return _event_stream(services, record, background_run, -1) if body.stream else _json(queued_response)
    run = ResponseRun(services, record, prepared_response, pool)
    builder = ResponseBuilder(services, prepared_response, run)

    async def store() -> None:
        if body.is_stored:
            await state.store.put(owner, builder.result, prepared_response.items)

    return await answer_request(request, services, run, builder, stream=bool(body.stream), on_complete=store)


@router.post(
    "/v1/responses/input_tokens", **route_options(ResponsesBody, "The number of tokens.", streams=False)
)
async def count_input_tokens(request: Request) -> Response:
    """Return the number of prompt tokens of a request without running the model."""
    services = Services.of(request)
    prepared_response = await _prepared_response(request, open_state(services), request_owner(request))
    count = len(prepared_response.conversation.context.prompt_tokens)
    return _json(msgspec.json.encode({"object": "response.input_tokens", "input_tokens": count}))


@router.get("/v1/responses/{response_id}", response_class=Response, responses=responses(400, 401, 404, 503))
async def retrieve_response(
    request: Request,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """Return a stored response. With `stream`, return the events of a background response."""
    services = Services.of(request)
    state, owner = open_state(services), request_owner(request)
    run = _background_run(state, owner, response_id)
    if not stream:
        if run is not None:
            return _json(msgspec.json.encode(run.builder.result))
        return _json((await _stored_response(state, owner, response_id)).body)
    if run is None or not run.keeps_events:
        await _stored_response(state, owner, response_id)
        raise RequestProblem(
            400,
            "the server stores events only for recent responses that were created with background and stream",
            param="stream",
        )
    return _event_stream(services, RequestRecord.of(request), run, starting_after)


@router.delete("/v1/responses/{response_id}", response_class=Response, responses=responses(401, 404, 503))
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response. Cancels a background response that is still running."""
    state, owner = open_state(Services.of(request)), request_owner(request)
    run = _background_run(state, owner, response_id)
    if run is not None:
        await run.cancel()
        state.runs.pop(response_id, None)
    if not await state.store.delete(owner, response_id):
        raise _not_found(response_id)
    return _json(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))


@router.post(
    "/v1/responses/{response_id}/cancel", response_class=Response, responses=responses(400, 401, 404, 503)
)
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a background response and return it. A response that has ended does not change."""
    state, owner = open_state(Services.of(request)), request_owner(request)
    run = _background_run(state, owner, response_id)
    if run is not None:
        return _json(msgspec.json.encode(await run.cancel()))
    stored_response = await _stored_response(state, owner, response_id)
    if not msgspec.json.decode(stored_response.body)["background"]:
        raise RequestProblem(400, "only a background response can be cancelled", param="response_id")
    return _json(stored_response.body)


@router.get(
    "/v1/responses/{response_id}/input_items",
    response_class=Response,
    responses=responses(400, 401, 404, 503),
)
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
    after: str | None = None,
) -> Response:
    """Return the input items of a stored response, including the items of its previous responses."""
    services = Services.of(request)
    stored_response = await _stored_response(open_state(services), request_owner(request), response_id)

    def page() -> bytes:
        items: list[dict[str, object]] = msgspec.json.decode(stored_response.input)
        if order == "desc":
            items.reverse()
        item_ids = [item["id"] for item in items]
        if after is not None and after not in item_ids:
            raise RequestProblem(400, f"after is {after[:100]!r}, which is not an input item", param="after")
        start = 0 if after is None else item_ids.index(after) + 1
        page_items = items[start : start + limit]
        page_object = {
            "object": "list",
            "data": page_items,
            "first_id": page_items[0]["id"] if page_items else None,
            "last_id": page_items[-1]["id"] if page_items else None,
            "has_more": start + limit < len(items),
        }
        return msgspec.json.encode(page_object)

    return _json(await asyncio.get_running_loop().run_in_executor(services.pool, page))


async def _prepared_response(request: Request, state: ResponseState, owner: str) -> PreparedResponse:
    """Read and prepare a request. Loads the previous response and referenced items from the store."""
    services = Services.of(request)
    raw = await request.json()
    previous_response = None
    if isinstance(raw, dict):
        if isinstance(previous_id := raw.get("previous_response_id"), str):
            previous_response = await _previous_response(state, owner, previous_id)
        if isinstance(raw.get("input"), list):
            raw = {**raw, "input": await _with_references_resolved(state, owner, raw["input"])}
    offered_tools = await find_offered_tools(services, raw)
    return await run_in_pool(
        request, lambda: PreparedResponse.of(services, raw, previous_response, offered_tools)
    )


async def _previous_response(state: ResponseState, owner: str, response_id: str) -> StoredResponse:
    run = _background_run(state, owner, response_id)
    if run is not None and not run.is_done:
        raise RequestProblem(
            400, f"the response {response_id} has not ended: wait for its end", param="previous_response_id"
        )
    stored_response = await state.store.get(owner, response_id)
    if stored_response is None:
        raise RequestProblem(
            400,
            f"there is no stored response {response_id[:100]!r}: send the whole conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return stored_response


async def _with_references_resolved(
    state: ResponseState, owner: str, input_items: list[object]
) -> list[object]:
    """Return the items with the stored item in place of each ``item_reference``."""
    items = []
    for index, item in enumerate(input_items):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            stored_item = await state.store.item(owner, str(item.get("id")))
            if stored_item is None:
                raise RequestProblem(
                    400,
                    f"input[{index}] refers to an item that is in no stored response: send the item itself",
                    param=f"input[{index}].id",
                    code="item_not_found",
                )
            item = stored_item
        items.append(item)
    return items


def open_state(services: Services) -> ResponseState:
    """Return the state of the Responses API. The first call opens the store.

    Raises:
        ConfigError: ``--state-dir`` cannot be used.
    """
    config = services.config
    return services.states.get_or_make(
        ResponseState, lambda: ResponseState(config.state_dir, config.response_store_size)
    )


def _background_run(state: ResponseState, owner: str, response_id: str) -> BackgroundRun | None:
    run = state.runs.get(response_id)
    return run if run is not None and run.owner == owner else None


async def _stored_response(state: ResponseState, owner: str, response_id: str) -> StoredResponse:
    stored_response = await state.store.get(owner, response_id)
    if stored_response is None:
        raise _not_found(response_id)
    return stored_response


def _not_found(response_id: str) -> RequestProblem:
    return RequestProblem(404, f"there is no stored response {response_id[:100]!r}", param="response_id")


def _event_stream(services: Services, record: RequestRecord, run: BackgroundRun, after: int) -> EventStream:
    """Return a stream of a background response's events. A disconnect does not cancel the response."""
    return EventStream(
        run.events(after),
        on_error=lambda error: record_error(services, record, error),
        on_disconnect=lambda: None,
        error_event=run.builder.error,
    )


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
