"""Routes for those who run the server: is it alive, is it ready, what is it, what does it do."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from penstock import __version__
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services

router = APIRouter(tags=["operations"])


class Status(BaseModel):
    """That all is well."""

    status: str


class Load(BaseModel):
    """How busy the server is."""

    server_load: int
    """Requests that were let in and have not been answered to the end."""


class Version(BaseModel):
    """What runs here."""

    version: str


@router.get("/health")
async def health(request: Request) -> Status:
    """Liveness: 200 while the worker that runs the model answers, else 503.

    A server that is being stopped is alive to the end.
    """
    worker = Services.of(request).worker
    if not worker.is_alive:
        raise RequestProblem(503, f"the worker is {worker.state}, not alive")
    return Status(status="ok")


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> Status:
    """The same as `/health`, under the name that SageMaker calls; also with POST."""
    return await health(request)


@router.get("/load")
async def load(request: Request) -> Load:
    """How many requests are being served or wait."""
    return Load(server_load=Services.of(request).gate.num_active)


@router.get("/ready")
async def ready(request: Request) -> Status:
    """Readiness: 200 when a request would be let in and run now, else 503."""
    services = Services.of(request)
    if services.gate.reason:
        raise RequestProblem(503, services.gate.reason)
    if services.worker.state != "ready":
        raise RequestProblem(503, f"the worker is {services.worker.state}")
    return Status(status="ready")


@router.get("/version")
async def version() -> Version:
    """The version of Penstock."""
    return Version(version=__version__)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Metrics in the text format of Prometheus."""
    found = Services.of(request).metrics
    return Response(found.render(), headers={"content-type": found.content_type})
