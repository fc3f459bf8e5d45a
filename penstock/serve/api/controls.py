"""Routes for operators: sleep, wake up, reload, reset of the prefix cache, and profiles of the workers.

All routes except ``/is_sleeping`` require ``--api-key``, or a server that listens on a loopback address.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from penstock.serve.api.operations import Status
from penstock.serve.http.openapi import responses
from penstock.serve.http.origins import is_loopback
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services
from penstock.worker.engine_client import EngineClient, SleepLevel

router = APIRouter(tags=["operations"])

_ERRORS = responses(400, 401, 403, 503)


class Sleep(BaseModel):
    """Whether the model is asleep."""

    is_sleeping: bool


@router.post("/sleep", responses=_ERRORS)
async def sleep(request: Request, level: int = 1) -> Sleep:
    """Refuse new requests, wait for running requests, and free the KV cache.

    The wait ends after `--shutdown-grace` seconds. `level=2` also frees the weights.
    """
    services = _checked_services(request)
    if level not in (1, 2):
        raise RequestProblem(400, f"level must be 1 or 2, was {level}", param="level")
    sleep_level: SleepLevel = 1 if level == 1 else 2
    await services.worker.sleep(sleep_level, services.config.shutdown_grace)
    services.log.info("the model is asleep, level %d", level)
    return Sleep(is_sleeping=True)


@router.post("/wake_up", responses=_ERRORS)
async def wake_up(request: Request) -> Sleep:
    """Accept requests again. After a sleep with `level=2`, the model is loaded first."""
    services = _checked_services(request)
    await services.worker.wake_up()
    _update_max_length(services)
    services.log.info("the model is awake")
    return Sleep(is_sleeping=False)


@router.get("/is_sleeping", responses=responses(401))
async def is_sleeping(request: Request) -> Sleep:
    """Return whether the model is asleep."""
    return Sleep(is_sleeping=Services.of(request).worker.state == "asleep")


@router.post("/reload", responses=_ERRORS)
async def reload(request: Request) -> Status:
    """Restart the workers one after another. The new workers read the checkpoint again.

    The server continues to serve requests. The tokenizer and the configuration are not read again.
    """
    services = _checked_services(request)
    await services.worker.reload(services.config.shutdown_grace)
    _update_max_length(services)
    services.log.info("all workers have been replaced")
    return Status(status="reloaded")


@router.post("/reset_prefix_cache", responses=_ERRORS)
async def reset_prefix_cache(request: Request) -> Status:
    """Clear the prefix cache. Running requests continue."""
    await _worker(request).reset_prefix_cache()
    return Status(status="reset")


@router.post("/start_profile", responses=_ERRORS)
async def start_profile(request: Request) -> Status:
    """Start recording a profile of the workers. Requires `--profile-dir`."""
    await _worker(request).start_profile()
    return Status(status="recording")


@router.post("/stop_profile", responses=_ERRORS)
async def stop_profile(request: Request) -> Status:
    """Stop recording and write the profiles to `--profile-dir`."""
    await _worker(request).stop_profile()
    return Status(status="written")


def _worker(request: Request) -> EngineClient:
    return _checked_services(request).worker


def _checked_services(request: Request) -> Services:
    """Return the services of a request.

    Raises:
        RequestProblem: 403; the server has no API key and does not listen on a loopback address.
    """
    services = Services.of(request)
    config = services.config
    if not config.api_key and not is_loopback(config.host):
        raise RequestProblem(
            403,
            "any client could stop this server: start it with --api-key, or with --host 127.0.0.1",
            code="controls_disabled",
        )
    return services


def _update_max_length(services: Services) -> None:
    """Set the tokenizer's maximum length to the maximum length of the workers.

    The maximum length can change, because it depends on the free memory at the start of a worker.
    """
    services.tokenizer.max_length = services.worker.info.max_length
