"""Authentication by API keys."""

from __future__ import annotations

import pytest
from support.app_client import app_client, make_services

from penstock.serve.http.auth import ApiKeys
from penstock.serve.http.problems import RequestProblem

KEYS = ("one", "sëcond")


@pytest.mark.parametrize(
    "header",
    [b"Bearer one", b"bearer one", b"Bearer  one ", "Bearer sëcond".encode()],
)
def test_valid_keys_are_accepted(header: bytes) -> None:
    ApiKeys(KEYS).check([(b"host", b"x"), (b"authorization", header)])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"one")],
        [(b"authorization", b"Basic one")],
        [(b"authorization", b"Bearer on")],
        [(b"authorization", b"Bearer onee")],
        [(b"authorization", b"Bearer One")],
        [(b"authorization", b"Bearer one two")],
        [(b"authorization", b"Bearer s\xebcond")],
        [(b"authorization", b"Bearer \xff\x00")],
        [(b"authorization", b"Bearer one"), (b"authorization", b"Bearer two")],
        [(b"x-api-key", b"on")],
        [(b"x-api-key", b"one"), (b"x-api-key", b"two")],
        [(b"x-api-key", b"one"), (b"authorization", b"Bearer on")],
    ],
)
def test_invalid_keys_are_refused_without_naming_a_valid_key(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(RequestProblem) as exc_info:
        ApiKeys(KEYS).check(headers)
    assert exc_info.value.status_code == 401
    assert exc_info.value.headers is not None
    assert exc_info.value.headers["www-authenticate"].startswith("Bearer")
    assert "one" not in exc_info.value.message


def test_without_keys_every_client_is_accepted() -> None:
    ApiKeys(()).check([])


async def test_routes_require_a_key_except_health_ready_version_and_metrics() -> None:
    async with app_client(make_services(api_key=KEYS)) as client:
        without_key = await client.get("/v1/models")
        invalid_response = await client.get("/v1/models", headers={"authorization": "Bearer x"})
        unknown_route = await client.post("/v1/nothing", content=b"x")
        valid_response = await client.get("/v1/nothing", headers={"authorization": "Bearer one"})
        probes = [await client.get(path) for path in ("/health", "/ready", "/version", "/metrics")]
    assert without_key.status_code == 401
    assert without_key.json()["error"]["code"] == "missing_api_key"
    assert invalid_response.json()["error"]["code"] == "invalid_api_key"
    assert invalid_response.headers["www-authenticate"].startswith("Bearer")
    assert unknown_route.status_code == 401  # unknown routes also require a key
    assert valid_response.status_code == 404
    assert [probe.status_code for probe in probes] == [200] * 4
