"""The routes ``/v1/files`` and ``/v1/batches`` of OpenAI's Batch API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field
from starlette.responses import FileResponse
from starlette.types import ASGIApp

from penstock.serve.api.json_parts import json_response
from penstock.serve.api.owners import request_owner
from penstock.serve.api.schemas import MAX_METADATA_ENTRIES, Label, RequestBody
from penstock.serve.api.text_generation import checked_body
from penstock.serve.batches.batch_lines import ENDPOINTS
from penstock.serve.batches.batch_manager import BatchManager
from penstock.serve.batches.batch_store import (
    BatchObject,
    ObjectStore,
    ObjectT,
    StoredObject,
    file_object,
    public_members,
)
from penstock.serve.batches.form import read_form
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import responses, route_options
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services

router = APIRouter(route_class=JsonRoute, tags=["batches"])

PageSize = Annotated[int, Query(ge=1, le=10_000)]


class BatchBody(RequestBody):
    """``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    """Has no effect, because a batch has no time limit."""
    metadata: Annotated[dict[Label, Label], Field(max_length=MAX_METADATA_ENTRIES)] | None = None


@router.post("/v1/files", response_class=Response, responses=responses(400, 401, 408, 413, 415, 503))
async def upload_file(request: Request) -> Response:
    """Store a file of requests. The request body is a form with the fields `file` and `purpose`."""
    services, manager = Services.of(request), _manager(request)
    file_id = manager.files.new_id()
    path = manager.files.content_path(file_id)
    config = services.config
    try:
        form = await read_form(request, path, max_bytes=config.max_file_size, timeout=config.body_timeout)
        if unknown_fields := sorted(form.fields.keys() - {"purpose"}):
            field = unknown_fields[0][:100]
            raise RequestProblem(400, f"unknown field {field!r}", param=field)
        if form.fields.get("purpose") != "batch":
            raise RequestProblem(400, "purpose must be batch", param="purpose")
        file = file_object(file_id, request_owner(request), form.file_name or "file", "batch", form.file_size)
        await asyncio.to_thread(manager.files.put, file)
    except BaseException:
        await asyncio.to_thread(path.unlink, missing_ok=True)
        raise
    return json_response(public_members(file))


@router.get("/v1/files", response_class=Response, responses=responses(400, 401, 503))
async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: PageSize = 10_000,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """Return a list of the files that belong to the API key. By default, the newest file comes first."""
    files = await asyncio.to_thread(_manager(request).files.all, request_owner(request))
    matching_files = [file for file in files if purpose is None or file["purpose"] == purpose]
    if order == "asc":
        matching_files.reverse()
    return _page(matching_files, limit, after)


@router.get("/v1/files/{file_id}", response_class=Response, responses=responses(400, 401, 404, 503))
async def retrieve_file(request: Request, file_id: str) -> Response:
    """Return the object that describes a file."""
    return json_response(public_members(await _stored_object(request, _manager(request).files, file_id)))


@router.get("/v1/files/{file_id}/content", response_class=Response, responses=responses(400, 401, 404, 503))
async def file_content(request: Request, file_id: str) -> Response:
    """Return the content of a file."""
    files = _manager(request).files
    stored_object = await _stored_object(request, files, file_id)
    return FileResponse(files.content_path(stored_object["id"]), media_type="application/jsonl")


@router.delete("/v1/files/{file_id}", response_class=Response, responses=responses(400, 401, 404, 503))
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file."""
    files = _manager(request).files
    stored_object = await _stored_object(request, files, file_id)
    await asyncio.to_thread(files.delete, stored_object["id"])
    return json_response({"id": file_id, "object": "file", "deleted": True})


@router.post("/v1/batches", **route_options(BatchBody, "The batch.", streams=False))
async def create_batch(request: Request) -> Response:
    """Start a batch, which runs the requests of a file with a lower priority than other requests."""
    services = Services.of(request)
    decoded_body = await request.json()
    manager, owner = _manager(request), request_owner(request)
    body = checked_body(services, BatchBody, decoded_body)
    if body.endpoint not in ENDPOINTS:
        raise RequestProblem(400, f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    input_file = await asyncio.to_thread(manager.files.get, body.input_file_id, owner)
    if input_file is None or input_file["purpose"] != "batch":
        raise RequestProblem(
            400,
            f"there is no file {body.input_file_id[:100]!r} with the purpose batch",
            param="input_file_id",
        )
    now = int(time.time())
    batch: BatchObject = {
        "id": manager.batches.new_id(),
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": None,
        "in_progress_at": None,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
        "owner": owner,
        "results": manager.files.new_id(),
        "failures": manager.files.new_id(),
    }
    await asyncio.to_thread(manager.batches.put, batch)
    manager.start()
    return json_response(public_members(batch))


@router.get("/v1/batches", response_class=Response, responses=responses(400, 401, 503))
async def list_batches(request: Request, limit: PageSize = 20, after: str | None = None) -> Response:
    """Return a list of the batches that belong to the API key. The newest batch comes first."""
    manager = _manager(request)
    batches = await asyncio.to_thread(manager.batches.all, request_owner(request))
    return _page([manager.current_state(batch) for batch in batches], limit, after)


@router.get("/v1/batches/{batch_id}", response_class=Response, responses=responses(400, 401, 404, 503))
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    """Return the current state of a batch."""
    manager = _manager(request)
    return json_response(
        public_members(manager.current_state(await _stored_object(request, manager.batches, batch_id)))
    )


@router.post(
    "/v1/batches/{batch_id}/cancel", response_class=Response, responses=responses(400, 401, 404, 503)
)
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Start to cancel a batch. Its existing results are kept. Does nothing if the batch has ended."""
    manager = _manager(request)
    return json_response(
        public_members(await manager.cancel(await _stored_object(request, manager.batches, batch_id)))
    )


def _manager(request: Request) -> BatchManager:
    """Return the batch manager of the server.

    Raises:
        RequestProblem: 400; the server has no ``--state-dir``.
        ConfigError: the folder of ``--state-dir`` cannot be used.
    """
    services = Services.of(request)
    folder = services.config.state_dir
    if folder is None:
        raise RequestProblem(
            400, "files and batches require a server with --state-dir", code="unsupported_parameter"
        )
    return open_manager(services, request.app)


def open_manager(services: Services, app: ASGIApp) -> BatchManager:
    """Return the batch manager of a server with ``--state-dir``. The first call creates the manager.

    Raises:
        ConfigError: the folder of ``--state-dir`` cannot be used.
    """
    folder = services.config.state_dir
    assert folder is not None
    return services.states.get_or_make(BatchManager, lambda: BatchManager(services, app, folder))


async def _stored_object(request: Request, store: ObjectStore[ObjectT], object_id: str) -> ObjectT:
    stored_object = await asyncio.to_thread(store.get, object_id, request_owner(request))
    if stored_object is None:
        raise RequestProblem(404, f"there is no file or batch {object_id[:100]!r}")
    return stored_object


def _page(objects: Sequence[StoredObject], limit: int, after: str | None) -> Response:
    object_ids = [item["id"] for item in objects]
    if after is not None and after not in object_ids:
        raise RequestProblem(400, f"after is {after[:100]!r}, which is not in the list", param="after")
    start = 0 if after is None else object_ids.index(after) + 1
    data = [public_members(item) for item in objects[start : start + limit]]
    page: dict[str, object] = {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(objects),
    }
    return json_response(page)
