"""Error responses have OpenAI's format. `ERROR_TABLE` has the status, type and code of each error class."""

from __future__ import annotations

import json
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Body, HTTPException
from pydantic import BaseModel, ConfigDict, Field
from support.app_client import app_client, make_services

from penstock import errors
from penstock.errors import (
    CheckpointNotFoundError,
    ConfigError,
    InputError,
    InsufficientBlocksError,
    InsufficientMemoryError,
    MissingDependencyError,
    OverloadedError,
    PenstockError,
    PromptTooLongError,
    RequestFailedError,
    UnavailableError,
    UnknownModelError,
    UnsupportedFeatureError,
    UnsupportedSchemaError,
)
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.problems import ERROR_TABLE, RequestProblem, field_path, problem_of

INVALID_REQUEST = "invalid_request_error"
UNAVAILABLE = "service_unavailable_error"

CASES: list[tuple[Exception, int, str, str | None, str | None, str | None]] = [
    (PromptTooLongError(9, 8), 400, INVALID_REQUEST, "context_length_exceeded", None, None),
    (UnknownModelError("x", ["demo"]), 404, INVALID_REQUEST, "model_not_found", "model", None),
    (UnsupportedSchemaError("not", "/a", "why"), 400, INVALID_REQUEST, "unsupported_schema", None, None),
    (UnsupportedFeatureError("images", "no"), 400, INVALID_REQUEST, "unsupported_value", None, None),
    (InputError("bad"), 400, INVALID_REQUEST, None, None, None),
    (CheckpointNotFoundError("/a", "none"), 400, INVALID_REQUEST, "invalid_path", None, None),
    (ConfigError("a", "b"), 400, INVALID_REQUEST, "invalid_value", None, None),
    (MissingDependencyError("x", "y", "z"), 400, INVALID_REQUEST, "unsupported_value", None, None),
    (OverloadedError("full", retry_after=3), 429, "rate_limit_error", "rate_limit_exceeded", None, "3"),
    (UnavailableError("gone", retry_after=7), 503, UNAVAILABLE, "service_unavailable", None, "7"),
    (InsufficientBlocksError(3, 1, 2), 503, UNAVAILABLE, "insufficient_memory", None, "1"),
    (
        InsufficientMemoryError("m", needed=1, available=0),
        503,
        UNAVAILABLE,
        "insufficient_memory",
        None,
        None,
    ),
    (RequestFailedError("oops"), 500, "server_error", "internal_error", None, None),
    (PenstockError("oops"), 500, "server_error", "internal_error", None, None),
    (RequestProblem(400, "m", param="p", code="c"), 400, INVALID_REQUEST, "c", "p", None),
    (RequestProblem(503, "m"), 503, UNAVAILABLE, "service_unavailable", None, "1"),
    (
        RequestProblem(503, "m", headers={"retry-after": "9"}),
        503,
        UNAVAILABLE,
        "service_unavailable",
        None,
        "9",
    ),
    (HTTPException(418, "tea"), 418, INVALID_REQUEST, None, None, None),
    (ZeroDivisionError("a secret"), 500, "server_error", "internal_error", None, None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case[0]).__name__}-{case[1]}")
def test_each_error_class_has_status_type_and_code(
    case: tuple[Exception, int, str, str | None, str | None, str | None],
) -> None:
    error, status, error_type, code, param, retry_after = case
    problem = problem_of(error)
    body = json.loads(problem.encode())
    assert problem.status == status
    assert body == {"error": {"message": problem.message, "type": error_type, "param": param, "code": code}}
    assert problem.headers.get("retry-after") == retry_after
    assert "secret" not in problem.message


def test_an_insufficient_memory_error_asks_clients_not_to_retry() -> None:
    assert problem_of(InsufficientMemoryError("m", needed=1, available=0)).headers == {
        "x-should-retry": "false"
    }


def test_the_table_covers_every_error_class() -> None:
    classes = [error_class for error_class in vars(errors).values() if isinstance(error_class, type)]
    for error_class in classes:
        if issubclass(error_class, PenstockError) and error_class is not PenstockError:
            class_and_parents = error_class.__mro__[: error_class.__mro__.index(PenstockError)]
            assert any(parent in ERROR_TABLE for parent in class_and_parents), error_class


def test_a_message_with_a_lone_surrogate_can_be_sent() -> None:
    body = json.loads(problem_of(RequestProblem(400, "was '\ud83d'", param="\ud83d")).encode())
    assert body["error"]["message"] == "was '\\ud83d'"
    assert body["error"]["param"] == "\\ud83d"


@pytest.mark.parametrize(
    ("location", "path"),
    [
        (("body", "messages", 0, "content"), "messages[0].content"),
        (("body",), ""),
        (("query", "limit"), "limit"),
        (("messages", 1), "messages[1]"),
        ((), ""),
    ],
)
def test_locations_become_field_paths(location: tuple[Any, ...], path: str) -> None:
    assert field_path(location) == path


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    content: str


class Form(BaseModel):
    count: int = Field(ge=1)
    inner: list[Inner] = Field(default_factory=list)


def make_failing_routes() -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/form")
    async def form(body: Annotated[Form, Body()]) -> int:
        return body.count

    @router.get("/items/{number}")
    async def item(number: int) -> int:
        return number

    @router.get("/error/{index}")
    async def error(index: int) -> None:
        raise CASES[index][0]

    return router


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "count", "missing_field"),
        ({"count": 0}, "count", "invalid_value"),
        ({"count": 1, "inner": [{"content": "a"}, {"content": 1}]}, "inner[1].content", "invalid_value"),
        ({"count": 1, "inner": [{"content": "a", "b": 1}]}, "inner[0].b", "unknown_field"),
        ([1], None, "invalid_value"),
    ],
)
async def test_a_validation_error_names_the_field(body: Any, param: str | None, code: str) -> None:
    async with app_client(make_services(), make_failing_routes()) as client:
        error = read_error(await client.post("/form", json=body), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, INVALID_REQUEST)


@pytest.mark.parametrize("index", range(len(CASES)))
async def test_each_error_of_a_route_is_converted(index: int) -> None:
    async with app_client(make_services(), make_failing_routes()) as client:
        response = await client.get(f"/error/{index}")
    read_error(response, CASES[index][1])
    assert response.headers.get("retry-after") == CASES[index][5]


async def test_errors_of_the_framework_have_the_openai_format() -> None:
    async with app_client(make_services(), make_failing_routes()) as client:
        unknown_route_error = read_error(await client.get("/v1/nothing"), 404)
        wrong_method_response = await client.get("/form")
        path_error = read_error(await client.get("/items/one"), 400)
        missing_field_error = read_error(
            await client.post("/form", headers={"content-type": "application/json"}), 400
        )
    assert unknown_route_error["code"] == "not_found"
    assert read_error(wrong_method_response, 405)["code"] == "method_not_allowed"
    assert wrong_method_response.headers["allow"] == "POST"
    assert path_error["param"] == "number"
    assert missing_field_error["param"] is None


def read_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """Check the exact format of an error response, and return its error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]  # type: ignore[no-any-return]
