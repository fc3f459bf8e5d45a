"""Routes that return liveness, readiness, load, version and metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from penstock import __version__
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services

router = APIRouter(tags=["operations"])


class Status(BaseModel):
    """The response to a successful check or command."""

    status: str


class ServerLoad(BaseModel):
    """The load of the server."""

    server_load: int
    """Number of requests that the server has accepted and that have not finished."""


class Version(BaseModel):
    """The version of the server."""

    version: str


@router.get("/health")
async def health(request: Request) -> Status:
    """Return 200 while at least one model worker responds or sleeps, else 503 (liveness).

    During shutdown the status stays 200 until the worker stops.
    """
    worker = Services.of(request).worker
    if not worker.is_alive:
        raise RequestProblem(503, f"the worker is {worker.state}")
    return Status(status="ok")


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> Status:
    """Do the same as `/health`. SageMaker calls this route. It also accepts POST."""
    return await health(request)


@router.get("/load")
async def load(request: Request) -> ServerLoad:
    """Return the number of accepted requests that have not finished."""
    return ServerLoad(server_load=Services.of(request).gate.num_active)


@router.get("/ready")
async def ready(request: Request) -> Status:
    """Return 200 if the server admits requests now, else 503 (readiness)."""
    services = Services.of(request)
    if services.gate.refusal_reason:
        raise RequestProblem(503, services.gate.refusal_reason)
    if services.worker.state != "ready":
        raise RequestProblem(503, f"the worker is {services.worker.state}")
    return Status(status="ready")


@router.get("/version")
async def version() -> Version:
    """Return the version of Penstock."""
    return Version(version=__version__)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return metrics in the Prometheus text format."""
    registry = Services.of(request).metrics
    return Response(registry.render(), headers={"content-type": registry.content_type})
