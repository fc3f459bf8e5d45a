"""Request bodies: size and time limits, and strict JSON. No body causes an internal error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Body, Request
from hypothesis import given
from hypothesis import strategies as st
from support.app_client import app_client, make_services

from penstock.serve.http.bodies import JsonRoute, decode_json
from penstock.serve.http.json_process import MAX_DEPTH
from penstock.serve.http.problems import RequestProblem

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


@given(JSON)
def test_valid_json_is_decoded(value: Any) -> None:
    assert decode_json(json.dumps(value).encode()) == value
    assert decode_json(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary() | st.text().map(str.encode))
def test_any_body_is_decoded_or_refused(body: bytes) -> None:
    with suppress(RequestProblem):  # any other exception would cause status 500
        decode_json(body)


INVALID_BODIES = {
    "only white space": (b" ", "Expecting value, at line 1, column 2"),
    "not JSON": (b"{'a': 1}", "at line 1, column 2"),
    "incomplete string": (b'{"a": "b', "at line 1"),
    "more than one value": (b"{} {}", "Extra data, at line 1, column 4"),
    "not UTF-8": (b'{"a": "caf\xe9"}', "not UTF-8, at byte 10"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8, at byte 0"),
    "byte order mark": (b'\xef\xbb\xbf{"a": 1}', "BOM"),
    "unescaped NUL": (b'{"a": "\x00"}', "control character"),
    "deep arrays": (b"[" * 20_000 + b"]" * 20_000, "deeper than 64 levels"),
    "deep objects": (b'{"a":' * 20_000 + b"1" + b"}" * 20_000, "deeper than 64 levels"),
    "one level too deep": (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "deeper than 64 levels"),
    "number of 5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "a number has too many digits"),
    "number beyond the range of floats": (b'{"a": 1e999}', "1e999 is too large"),
    "NaN": (b'{"a": NaN}', "NaN is not a JSON number"),
    "minus infinity": (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
    "lone surrogate": (b'{"a": "\\ud83d"}', "unpaired surrogate"),
    "lone surrogate in a key": (b'{"\\uDC00": 1}', "unpaired surrogate"),
    "duplicate key": (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice"),
}


@pytest.mark.parametrize(("body", "message"), INVALID_BODIES.values(), ids=INVALID_BODIES.keys())
def test_invalid_bodies_are_refused_with_the_reason(body: bytes, message: str) -> None:
    with pytest.raises(RequestProblem) as exc_info:
        decode_json(body)
    assert exc_info.value.status_code == 400
    assert exc_info.value.code == "invalid_json"
    assert message in exc_info.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        b"[" * (MAX_DEPTH - 1) + b"[],[]" + b"]" * (MAX_DEPTH - 1),
        b'{"a": [' + b"{}," * 999 + b'{"b": "[[[[["}]}',
        b'{"a": "\\ud83d\\ude00 \\u0000"}',
        b'["\\\\ud83d"]',
    ],
)
def test_unusual_valid_bodies_are_decoded(body: bytes) -> None:
    assert decode_json(body) == json.loads(body)


def make_echo_router() -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/echo")
    async def echo_body(body: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
        return body

    @router.post("/raw")
    async def read_raw(request: Request) -> Any:
        return await request.json()

    return router


@pytest.mark.parametrize("path", ["/echo", "/raw"])
@pytest.mark.parametrize(("body", "message"), INVALID_BODIES.values(), ids=INVALID_BODIES.keys())
async def test_requests_with_invalid_bodies_get_400(path: str, body: bytes, message: str) -> None:
    async with app_client(make_services(), make_echo_router()) as client:
        response = await post(client, body, path=path)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "invalid_json"


async def test_only_bodies_up_to_the_maximum_size_are_accepted() -> None:
    body = json.dumps({"a": "b" * 100_000}).encode()  # so large that a separate process decodes it
    async with app_client(make_services(max_body_size=len(body)), make_echo_router()) as client:
        assert (await post(client, body)).json() == {"a": "b" * 100_000}
    async with app_client(make_services(max_body_size=len(body) - 1), make_echo_router()) as client:
        refused_response = await post(client, body)
    assert refused_response.status_code == 413
    assert refused_response.json()["error"]["code"] == "request_too_large"
    assert str(len(body) - 1) in refused_response.json()["error"]["message"]


async def test_the_number_of_concurrent_large_bodies_is_limited() -> None:
    services = make_services()
    services.large_bodies.acquire()
    large_body = json.dumps({"a": "b" * 600_000}).encode()
    async with app_client(services, make_echo_router()) as client:
        assert (await post(client, large_body, path="/raw")).status_code == 200
        while services.large_bodies.num_active < 8:
            services.large_bodies.acquire()
        refused_response = await post(client, large_body, path="/raw")
        assert (refused_response.status_code, refused_response.headers["retry-after"]) == (429, "5")
        assert (await post(client, b"{}", path="/raw")).status_code == 200, "small bodies need no slot"
        services.large_bodies.release()
        assert (await post(client, large_body, path="/raw")).status_code == 200
        assert (await post(client, b"[" + large_body, path="/raw")).status_code == 400
        assert services.large_bodies.num_active == 7, "each request releases its slot, even if it is refused"


async def test_the_size_limit_applies_while_a_body_arrives() -> None:
    """A body without Content-Length is refused when the received bytes exceed the limit."""
    num_sent_bytes = 0

    async def send_chunks() -> AsyncIterator[bytes]:
        nonlocal num_sent_bytes
        while True:
            num_sent_bytes += 1000
            yield b"a" * 1000

    async with app_client(make_services(max_body_size=10_000), make_echo_router()) as client:
        response = await client.post(
            "/echo", content=send_chunks(), headers={"content-type": "application/json"}
        )
    assert response.status_code == 413
    assert num_sent_bytes < 13_000


async def test_a_body_with_a_too_large_content_length_is_not_read() -> None:
    num_sent_chunks = 0

    async def send_chunks() -> AsyncIterator[bytes]:
        nonlocal num_sent_chunks
        num_sent_chunks += 1
        yield b"{}"

    headers = {"content-type": "application/json", "content-length": "10001"}
    async with app_client(make_services(max_body_size=10_000), make_echo_router()) as client:
        response = await client.post("/echo", content=send_chunks(), headers=headers)
    assert (response.status_code, num_sent_chunks) == (413, 0)


async def test_a_body_that_is_not_received_in_time_gets_408() -> None:
    async def send_chunks() -> AsyncIterator[bytes]:
        yield b'{"a":'
        await asyncio.sleep(60)
        yield b"1}"

    async with app_client(make_services(body_timeout=0.05), make_echo_router()) as client:
        response = await client.post(
            "/echo", content=send_chunks(), headers={"content-type": "application/json"}
        )
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "request_timeout"


@pytest.mark.parametrize(
    ("media_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ('application/json; charset="UTF-8"', 200),
        ("Application/JSON", 200),
        ("application/merge-patch+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/json; charset=latin-1", 415),
        ("nonsense", 415),
        ("", 415),
    ],
)
async def test_only_json_media_types_are_accepted(media_type: str, status: int) -> None:
    async with app_client(make_services(), make_echo_router()) as client:
        response = await post(client, b'{"a": 1}', media_type)
    assert response.status_code == status
    if status != 200:
        assert response.json()["error"]["code"] == "unsupported_media_type"


async def test_a_body_without_a_content_type_is_refused() -> None:
    """Browsers send such a request of a page to another site without a preflight request."""
    async with app_client(make_services(), make_echo_router()) as client:
        response = await client.post("/raw", content=b'{"a": 1}')
    assert response.status_code == 415
    assert "Content-Type: application/json" in response.json()["error"]["message"]


async def post(
    client: httpx.AsyncClient, body: bytes, media_type: str = "application/json", path: str = "/echo"
) -> httpx.Response:
    return await client.post(path, content=body, headers={"content-type": media_type})
