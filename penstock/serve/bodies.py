"""The bodies of requests: bounded in size and time, and JSON in the strict sense.

A router whose handlers take JSON is made with ``APIRouter(route_class=JsonRoute)``.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from penstock.serve.problems import RequestProblem
from penstock.serve.services import LONG_BODY, Services

MAX_DEPTH = 64
"""Objects and arrays inside each other; deeper ones exhaust the stack of whoever walks over them."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LARGE = 64 * 1024  # bytes; longer bodies are decoded in the pool


class JsonRequest(Request):
    """A request whose body is read within the server's limits and decoded strictly."""

    _read_body: bytes | None = None
    _is_long = False

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            RequestProblem: 413 too long, counted as it arrives; 408 too slow; 415 not said to be JSON.
            OverloadedError: 429 it is long, and so are as many others as are held at once.
        """
        if self._read_body is None:
            self._check_media_type()
            config = Services.of(self).config
            try:
                async with asyncio.timeout(config.body_timeout):
                    self._read_body = await self._read(config.max_body_size)
            except TimeoutError:
                raise RequestProblem(
                    408,
                    f"the body did not arrive within {config.body_timeout:g} seconds",
                    headers={"connection": "close"},
                ) from None
        return self._read_body

    async def json(self) -> Any:
        """The decoded body.

        Raises:
            RequestProblem: 400 it is no JSON, or JSON that nobody could mean.
        """
        body = await self.body()
        if len(body) <= _LARGE:
            return decode_json(body)
        pool = Services.of(self).pool_for(len(body))
        return await asyncio.get_running_loop().run_in_executor(pool, decode_json, body)

    def _check_media_type(self) -> None:
        given = self.headers.get("content-type")
        if given is None:  # pages of other sites may send such a request without a preflight
            raise RequestProblem(
                415, "the body must be JSON: send 'Content-Type: application/json', which is missing"
            )
        kind, _, charset = given.partition(";")
        kind = kind.strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise RequestProblem(
                415, f"the body must be JSON: send 'Content-Type: application/json', not {given!r}"
            )
        _, is_charset, name = charset.lower().partition("charset=")
        if is_charset and name.strip(" \"'") not in ("utf-8", "utf8", "us-ascii"):
            raise RequestProblem(415, f"the body must be UTF-8, not {name!r}")

    async def _read(self, limit: int) -> bytes:
        announced = self.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            _too_long(limit)
        parts, size = [], 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                _too_long(limit)
            if size > LONG_BODY and not self._is_long:
                Services.of(self).long_bodies.enter()
                self._is_long = True
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def let_go(self) -> None:
        """Nobody reads the body any more."""
        if self._is_long:
            self._is_long = False
            Services.of(self).long_bodies.leave()


class JsonRoute(APIRoute):
    """A route whose handlers are given a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind a `JsonRequest`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            json_request = JsonRequest(request.scope, request.receive, request._send)
            try:
                return await handler(json_request)
            finally:
                json_request.let_go()

        return handle


def decode_json(body: bytes) -> Any:
    """Decodes JSON strictly: UTF-8, numbers that floats can hold, no key twice, no half surrogate pairs.

    Raises:
        RequestProblem: 400, which says what is wrong and where.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _invalid(f"it is not UTF-8, at byte {error.start}")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        _invalid(f"{error.msg}, at line {error.lineno}, column {error.colno}")
    except RecursionError:
        _invalid(f"it is nested deeper than {MAX_DEPTH} levels")
    except ValueError:  # a whole number of more digits than Python reads
        _invalid("it has a number that is too long")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        _invalid(f"it is nested deeper than {MAX_DEPTH} levels")
    if _SURROGATE.search(body) and not _is_unicode(value):
        _invalid("it has half of a surrogate pair, which is no character")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                _invalid(f"the key {name[:100]!r} stands twice in one object")
            seen.add(name)
    return found


def _no_constant(name: str) -> NoReturn:
    _invalid(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _invalid(f"the number {text[:40]} is too large")
    return value


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return False
        level = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
    return True


def _too_long(limit: int) -> NoReturn:
    raise RequestProblem(
        413,
        f"the body is longer than {limit} bytes, the limit of this server",
        headers={"connection": "close"},
    )


def _invalid(problem: str) -> NoReturn:
    raise RequestProblem(400, f"the body is not valid JSON: {problem}", code="invalid_json")
