"""The routes of the playground: its files and its statistics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from penstock import __version__
from penstock.serve.playground.assets import Asset, assets
from penstock.serve.services import Services

router = APIRouter(include_in_schema=False)

_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Makes code that creates HTML from text raise an error.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_HEADERS = {
    # Browsers revalidate the cached page on each load, so a new server version takes effect at once.
    "cache-control": "no-cache",
    "content-security-policy": _CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Stats(BaseModel):
    """Statistics of the server. The numbers of tokens count since the worker started."""

    state: str
    """State of the worker, see `EngineState`."""
    version: str
    seconds: float
    """Time of the statistics in seconds, from a monotonic clock."""
    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_used: int
    kv_blocks_cached: int
    generated_tokens: int
    prompt_tokens: int


@router.get("/playground/stats")
async def stats(request: Request, response: Response) -> Stats:
    """Return the live statistics. Like ``/metrics``, the route needs no API key."""
    services = Services.of(request)
    worker = services.worker
    now = worker.stats
    response.headers["cache-control"] = "no-store"
    return Stats(
        state=worker.state,
        version=__version__,
        seconds=time.monotonic(),
        running=now.num_running,
        waiting=now.num_waiting,
        kv_blocks=now.num_blocks,
        kv_blocks_used=now.num_used_blocks,
        kv_blocks_cached=now.num_cached_blocks,
        generated_tokens=now.num_generated_tokens,
        prompt_tokens=now.num_prompt_tokens,
    )


def _file_handler(asset: Asset) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of one file."""

    async def send(request: Request) -> Response:
        headers = {**_HEADERS, "etag": asset.etag}
        if _matches_etag(request.headers.get("if-none-match", ""), asset):
            return Response(None, 304, headers)
        return Response(asset.content, 200, {**headers, "content-type": asset.media_type})

    return send


def _matches_etag(client_etags: str, asset: Asset) -> bool:
    """Return whether a list of ETags has the file's ETag or ``*``. A compressing proxy adds ``W/``."""
    return any(tag.strip().removeprefix("W/") in (asset.etag, "*") for tag in client_etags.split(","))


for _path, _asset in assets().items():
    router.add_api_route(_path, _file_handler(_asset), methods=["GET", "HEAD"])
