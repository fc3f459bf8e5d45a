"""The routes of the page: its files, and the numbers of its live panel."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from penstock import __version__
from penstock.serve.playground.assets import Asset, assets
from penstock.serve.services import Services

router = APIRouter(include_in_schema=False)

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Whatever would make HTML of text throws instead.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_HEADERS = {
    # Kept, and asked about each time: a new version of the server is a new page at once.
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Stats(BaseModel):
    """How the server stands; totals are of the worker's life, and begin again with it."""

    state: str
    """Of the worker: starting, ready, restarting, stopping, stopped."""
    version: str
    seconds: float
    """When this was, on a clock that never goes back."""
    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_used: int
    kv_blocks_cached: int
    generated_tokens: int
    prompt_tokens: int


@router.get("/playground/stats")
async def stats(request: Request, response: Response) -> Stats:
    """The numbers of the live panel. They are among those of ``/metrics``, and as open."""
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


def _sender(asset: Asset) -> Callable[[Request], Awaitable[Response]]:
    """The handler of one file."""

    async def send(request: Request) -> Response:
        headers = {**_HEADERS, "etag": asset.etag}
        if _has(request.headers.get("if-none-match", ""), asset):
            return Response(None, 304, headers)
        return Response(asset.content, 200, {**headers, "content-type": asset.media_type})

    return send


def _has(known: str, asset: Asset) -> bool:
    """Whether a list of tags names the file's; a proxy that compressed it calls its tag weak."""
    return any(tag.strip().removeprefix("W/") in (asset.etag, "*") for tag in known.split(","))


for _path, _asset in assets().items():
    router.add_api_route(_path, _sender(_asset), methods=["GET", "HEAD"])
