"""The routes ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, which change adapters at run time.

The server reads a directory that the client chooses. The routes therefore require ``--enable-lora``, and
either ``--api-key`` or a server that listens on a loopback address. ``--lora-dir`` restricts the directories.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from penstock.serve.api.generation import run_in_pool
from penstock.serve.api.schemas import LoadAdapterBody, UnloadAdapterBody
from penstock.serve.api.text_generation import checked_body
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import BODY_ERRORS, request_body, responses
from penstock.serve.http.origins import is_loopback
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services

router = APIRouter(route_class=JsonRoute, tags=["adapters"], default_response_class=PlainTextResponse)


@router.post(
    "/v1/load_lora_adapter",
    openapi_extra=request_body(LoadAdapterBody),
    responses=responses(*BODY_ERRORS, 409),
)
async def load_adapter(request: Request) -> str:
    """Load a PEFT directory as an adapter, or replace a loaded adapter.

    The response is sent when requests can use the adapter. Running requests continue with the old adapter.
    """
    services = Services.of(request)
    _check_allowed(services)
    body = checked_body(services, LoadAdapterBody, await request.json())
    name = body.lora_name
    if name == services.model_name:
        raise RequestProblem(
            409,
            f"{name!r} is the name of the model: use another name",
            param="lora_name",
            code="name_in_use",
        )
    is_loaded = name in services.worker.adapters
    if is_loaded and body.load_inplace is False:
        raise RequestProblem(
            409,
            f"an adapter {name!r} is loaded, and load_inplace is false: unload the adapter first",
            param="lora_name",
            code="name_in_use",
        )
    path = await run_in_pool(request, lambda: _allowed_path(services, body.lora_path))
    await services.worker.load_adapter(name, path)
    services.log.info("the adapter %s was %s from %s", name, "reloaded" if is_loaded else "loaded", path)
    return f"The adapter {name!r} is {'reloaded' if is_loaded else 'loaded'}."


@router.post(
    "/v1/unload_lora_adapter",
    openapi_extra=request_body(UnloadAdapterBody),
    responses=responses(*BODY_ERRORS),
)
async def unload_adapter(request: Request) -> str:
    """Unload an adapter. Running requests that use it continue."""
    services = Services.of(request)
    _check_allowed(services)
    body = checked_body(services, UnloadAdapterBody, await request.json())
    await services.worker.unload_adapter(body.lora_name)
    services.log.info("the adapter %s was unloaded", body.lora_name)
    return f"The adapter {body.lora_name!r} is unloaded."


def _check_allowed(services: Services) -> None:
    if not services.pipeline_config.lora.enable_lora:
        raise RequestProblem(
            403,
            "this server loads adapters only at start-up: start it with --enable-lora",
            code="lora_disabled",
        )
    config = services.config
    if not config.api_key and not is_loopback(config.host):
        raise RequestProblem(
            403,
            "any client could load adapters: start the server with --api-key, or with --host 127.0.0.1",
            code="lora_disabled",
        )


def _allowed_path(services: Services, lora_path: str) -> str:
    """Return the directory of an adapter.

    With ``--lora-dir``, ``lora_path`` is relative to that directory, or an absolute path inside it.

    Raises:
        RequestProblem: 400; ``lora_path`` contains a NUL character. 403; it points outside ``--lora-dir``.
    """
    lora_dir = services.pipeline_config.lora.lora_dir
    if "\0" in lora_path:
        raise RequestProblem(400, "lora_path contains a NUL character", param="lora_path")
    if lora_dir is None:
        return lora_path
    root = Path(lora_dir).expanduser().resolve()
    path = (root / lora_path).resolve()
    if not path.is_relative_to(root):
        raise RequestProblem(
            403, f"lora_path must be inside the directory {root}, but {lora_path!r} is not", param="lora_path"
        )
    return str(path)
