"""Host and Origin headers, and cross-origin requests that browsers send without a preflight request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.app_client import app_client, make_services

from penstock.serve.http.origins import host_name, is_loopback

LOAD_ROUTE = "/v1/load_lora_adapter"
BODY = {"lora_name": "a", "lora_path": "/etc"}


async def send_request(
    path: str, headers: dict[str, str], method: str = "GET", **config: Any
) -> httpx.Response:
    services = make_services(**config)
    async with app_client(services) as client:
        body_fields = {"json": BODY} if method == "POST" else {}
        return await client.request(method, path, headers=headers, **body_fields)


LOCAL_HOSTS = [
    "localhost",
    "LOCALHOST:8000",
    "127.0.0.1:8000",
    "127.1.2.3",
    "[::1]:80",
    "a.localhost",
    "localhost.",
]
FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "192.168.1.5",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
]
INVALID_HOSTS = [
    "",
    "a b",
    "user@localhost",
    "localhost:x",
    "localhost/x",
    "localhost,evil.example",
    "[::1",
    "localhost#",
]


@pytest.mark.parametrize("host", LOCAL_HOSTS)
@pytest.mark.parametrize("listening_host", ["127.0.0.1", "localhost", "::1"])
async def test_a_local_server_accepts_its_own_names(host: str, listening_host: str) -> None:
    assert (await send_request("/v1/models", {"host": host}, host=listening_host)).status_code == 200


@pytest.mark.parametrize("host", [*FOREIGN_HOSTS, *INVALID_HOSTS])
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/", "/metrics", "/nothing"])
async def test_a_local_server_refuses_foreign_and_invalid_names(host: str, path: str) -> None:
    response = await send_request(path, {"host": host})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (
        421,
        "unknown_host",
        "invalid_request_error",
    )
    assert "--allowed-hosts" in error["message"]


async def test_the_error_for_an_unknown_host_names_the_settings() -> None:
    error = (await send_request("/health", {"host": "llm.example:8000"})).json()["error"]
    assert "--allowed-hosts llm.example, or with --api-key" in error["message"]


@pytest.mark.parametrize(
    ("config", "host", "status"),
    [
        ({"host": "0.0.0.0"}, "llm.example", 200),  # clients on other machines may use any name of the server
        ({"host": "::"}, "llm.example", 200),
        ({"host": "10.0.0.1"}, "llm.example", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["llm.example"]}, "llm.example", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["llm.example"]}, "localhost:80", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["llm.example"]}, "evil.example", 421),
        ({"host": "10.0.0.1", "allowed_hosts": ["llm.example"]}, "10.0.0.1:8000", 200),
        ({"host": "10.0.0.1", "allowed_hosts": ["llm.example"]}, "10.0.0.2:8000", 421),
        ({"allowed_hosts": ["LLM.example"]}, "llm.Example:443", 200),
        ({"allowed_hosts": ["*.example"]}, "a.llm.example", 200),
        ({"allowed_hosts": ["*.example"]}, "llmexample", 421),
        ({"allowed_hosts": ["*"]}, "evil.example", 200),
        ({"api_key": ["k"]}, "evil.example", 200),
        ({"api_key": ["k"], "allowed_hosts": ["llm.example"]}, "evil.example", 421),
    ],
)
async def test_the_settings_decide_which_hosts_are_accepted(
    config: dict[str, Any], host: str, status: int
) -> None:
    headers = {"host": host, "authorization": "Bearer k"}
    assert (await send_request("/v1/models", headers, **config)).status_code == status


async def test_several_host_headers_are_refused() -> None:
    async with app_client(make_services()) as client:
        response = await client.get("/health", headers=[("host", "localhost"), ("host", "evil.example")])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_http")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9999"},
        {"origin": "http://[::1"},
        {"origin": "http://localhost", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", [LOAD_ROUTE, "/v1/completions", "/nothing"])
async def test_requests_of_foreign_pages_are_refused(headers: dict[str, str], path: str) -> None:
    response = await send_request(path, headers, "POST")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (
        403,
        "foreign_origin",
        "invalid_request_error",
    )
    assert "--cors-origins" in error["message"]
    public_server_response = await send_request(path, headers, "POST", host="0.0.0.0")
    assert public_server_response.status_code == 403, "must be refused on every listening address"


@pytest.mark.parametrize(
    ("headers", "config"),
    [
        ({}, {}),
        ({"origin": "http://localhost"}, {}),  # as sent by the playground
        ({"origin": "http://localhost:8000", "host": "localhost:8000"}, {}),
        (
            {"origin": "https://llm.example", "sec-fetch-site": "same-origin"},
            {},
        ),  # as sent by a page of a server behind a proxy
        ({"sec-fetch-site": "none"}, {}),
        ({"origin": "https://app.example"}, {"cors_origins": ["https://app.example"]}),
        (
            {"origin": "https://app.example", "sec-fetch-site": "cross-site"},
            {"cors_origins": ["https://app.example"]},
        ),
        ({"origin": "https://any.example"}, {"cors_origins": ["*"]}),
        ({"origin": "https://app.example", "authorization": "Bearer k"}, {"api_key": ["k"]}),
    ],
)
async def test_same_origin_and_allowed_requests_are_accepted(
    headers: dict[str, str], config: dict[str, Any]
) -> None:
    response = await send_request("/nothing", headers, "POST", **config)
    assert response.status_code == 404


async def test_the_error_has_the_format_of_the_api_of_the_path() -> None:
    foreign_headers = {"origin": "https://evil.example"}
    refused_response = await send_request("/v1/messages", foreign_headers, "POST")
    assert refused_response.status_code == 403
    assert (refused_response.json()["type"], refused_response.json()["error"]["type"]) == (
        "error",
        "permission_error",
    )
    assert refused_response.json()["request_id"] == refused_response.headers["x-request-id"]
    assert isinstance((await send_request("/api/chat", foreign_headers, "POST")).json()["error"], str)
    assert isinstance((await send_request("/api/tags", {"host": "evil.example"})).json()["error"], str)


async def test_get_routes_accept_any_origin() -> None:
    assert (await send_request("/health", {"origin": "http://evil.example"})).status_code == 200


async def test_a_preflight_request_of_an_allowed_origin_is_accepted() -> None:
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    response = await send_request("/v1/completions", headers, "OPTIONS", cors_origins=["https://app.example"])
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (
        200,
        "https://app.example",
    )


@pytest.mark.parametrize("media_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_requests_that_browsers_send_without_a_preflight_request_are_refused(
    media_type: str | None,
) -> None:
    """A browser sends requests with these media types, or with none, without a preflight request."""
    headers = {} if media_type is None else {"content-type": media_type}
    async with app_client(make_services()) as client:
        response = await client.post(
            LOAD_ROUTE, content=b'{"lora_name": "a", "lora_path": "/etc"}', headers=headers
        )
    assert response.status_code == 415


@pytest.mark.parametrize("host", LOCAL_HOSTS)
def test_names_of_this_machine_are_recognized(host: str) -> None:
    name = host_name(host)
    assert name is not None
    assert is_loopback(name)


@pytest.mark.parametrize("host", INVALID_HOSTS)
def test_invalid_hosts_are_refused(host: str) -> None:
    assert host_name(host) is None
