"""What all routes share: request ids, access log, gate, errors, probes, CORS, HEAD and body limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from support.app_client import app_client, make_services
from support.asgi import wait_until
from support.engines import FakeEngine

import penstock
from penstock.errors import UnavailableError
from penstock.pipelines.core import PipelineTask
from penstock.serve.app import create_app
from penstock.serve.http.gate import Gate
from penstock.serve.observability.request_record import RequestRecord


def make_failing_routes(may_finish: asyncio.Event | None = None) -> APIRouter:
    """Return test routes. Most of them fail.

    The route "/slow" waits until `may_finish` is set. If `may_finish` is None, the route waits forever.
    """
    router = APIRouter()

    @router.get("/bug")
    async def bug() -> None:
        raise ZeroDivisionError("a secret of ours")

    @router.get("/items/{name}")
    async def item(name: str, request: Request) -> str:
        record = RequestRecord.of(request)
        record.model, record.finish_reasons = "demo", ["stop", "length"]
        record.user, record.metadata = "ann\nlevel=error", {"a": "b c"}
        record.prompt_tokens, record.completion_tokens = 5, 2
        record.admitted()
        record.tokens(1)
        return name

    async def yield_and_fail(error: Exception) -> AsyncIterator[str]:
        yield "data: 1\n\n"
        raise error

    @router.get("/stream/bug")
    async def stream_bug() -> StreamingResponse:
        return StreamingResponse(
            yield_and_fail(ZeroDivisionError("a secret")), media_type="text/event-stream"
        )

    @router.get("/stream/gone")
    async def stream_gone() -> StreamingResponse:
        return StreamingResponse(
            yield_and_fail(UnavailableError("the worker died")), media_type="text/event-stream"
        )

    @router.get("/text/bug")
    async def text_bug() -> StreamingResponse:
        return StreamingResponse(yield_and_fail(ZeroDivisionError("a secret")), media_type="text/plain")

    @router.get("/left")
    async def wait_for_disconnect(request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        raise ClientDisconnect

    @router.get("/watching")
    async def watching(request: Request) -> Response:
        async def watch_disconnect() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        # A background task runs after the response is sent.
        return Response("done", background=BackgroundTask(watch_disconnect))

    @router.get("/slow")
    async def slow() -> str:
        await (may_finish or asyncio.Event()).wait()
        return "done"

    return router


@pytest.mark.parametrize("request_id", ["abc", "a" * 128, "A-z_0.9:/+=@"])
async def test_the_request_id_is_returned(request_id: str) -> None:
    async with app_client(make_services(), make_failing_routes()) as client:
        for path in ("/items/a", "/bug", "/nowhere", "/health"):
            response = await client.get(path, headers={"x-request-id": request_id})
            assert response.headers.get_list("x-request-id") == [request_id]


@pytest.mark.parametrize("request_id", ["", "a" * 129, "a b", "a\tb", "ä", "a;b", '"'])
async def test_an_invalid_request_id_is_replaced(request_id: str) -> None:
    async with app_client(make_services(), make_failing_routes()) as client:
        response = await client.get("/items/a", headers=[(b"x-request-id", request_id.encode("latin-1"))])
    assert response.headers["x-request-id"] != request_id
    assert len(response.headers["x-request-id"]) == 32


async def test_each_request_without_an_id_gets_a_unique_id() -> None:
    async with app_client(make_services(), make_failing_routes()) as client:
        ids = {(await client.get("/items/a")).headers["x-request-id"] for _ in range(10)}
    assert len(ids) == 10


async def test_an_unexpected_error_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    async with app_client(make_services(), make_failing_routes()) as client:
        response = await client.get("/bug", headers={"x-request-id": "abc"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    [failure] = [record for record in caplog.records if record.exc_info]
    assert "a secret of ours" in str(failure.exc_info[1])  # type: ignore[index]
    assert failure.fields == {"id": "abc"}  # type: ignore[attr-defined]


async def test_a_stream_that_fails_ends_with_an_error_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    services = make_services()
    async with app_client(services, make_failing_routes()) as client:
        bug_response = await client.get("/stream/bug")
        unavailable_response = await client.get("/stream/gone")
    assert bug_response.status_code == unavailable_response.status_code == 200
    assert bug_response.text.startswith('data: 1\n\ndata: {"error":')
    assert bug_response.text.endswith("}}\n\n")
    assert "secret" not in bug_response.text
    assert "the worker died" in unavailable_response.text
    assert [line["status"] for line in read_access_log(caplog)] == [500, 503]
    assert [line["outcome"] for line in read_access_log(caplog)] == [
        "error:internal_error",
        "error:service_unavailable",
    ]


async def test_an_error_within_a_response_without_events_is_raised_to_the_http_server() -> None:
    async with app_client(make_services(), make_failing_routes()) as client:
        with pytest.raises(ZeroDivisionError):  # the HTTP server then closes the connection
            await client.get("/text/bug")


async def test_each_request_has_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with app_client(make_services(), make_failing_routes()) as client:
        await client.get("/items/secret-name", headers={"x-request-id": "abc"})
    [line] = read_access_log(caplog)
    times = [line.pop(name) for name in ("queue_s", "first_token_s", "total_s")]
    assert times == sorted(times)
    assert line == {
        "id": "abc",
        "method": "GET",
        "route": "/items/{name}",
        "status": 200,
        "outcome": "stop,length",
        "model": "demo",
        "stream": None,
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "completion_tokens": 2,
        "user": "ann\nlevel=error",
        "safety_identifier": None,
        "metadata": {"a": "b c"},
    }


async def test_probes_are_not_logged_at_info_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with app_client(make_services()) as client:
        await client.get("/health")
        assert read_access_log(caplog) == []
        await client.get("/nowhere")
    assert [line["route"] for line in read_access_log(caplog)] == ["unmatched"]


async def test_the_access_log_can_be_disabled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with app_client(make_services(access_log=False)) as client:
        await client.get("/nowhere")
    assert read_access_log(caplog) == []


async def test_a_disconnected_client_is_logged_with_status_499(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    services = make_services()
    sent_messages = await get_and_disconnect(create_app(services, make_failing_routes()), "/left")
    [line] = read_access_log(caplog)
    assert (line["outcome"], line["status"]) == ("abort:client_disconnect", 499)
    assert sent_messages == []
    assert services.gate.num_active == 0
    metric_line = b'penstock_requests_total{method="GET",route="/left",status="499"} 1.0'
    assert metric_line in services.metrics.render()


async def test_a_client_that_disconnects_after_its_answer_is_not_logged_as_499(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    await get_and_disconnect(create_app(make_services(), make_failing_routes()), "/watching")
    [line] = read_access_log(caplog)
    assert (line["outcome"], line["status"]) == ("-", 200)


async def test_a_cancelled_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    services = make_services()
    async with app_client(services, make_failing_routes()) as client:
        task = asyncio.create_task(client.get("/slow"))
        await wait_until(lambda: services.gate.num_active == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [line["outcome"] for line in read_access_log(caplog)] == ["error:cancelled"]
    assert services.gate.num_active == 0


async def test_health_and_ready_fail_while_the_worker_restarts() -> None:
    worker = FakeEngine()
    async with app_client(make_services(worker)) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).json() == {"status": "ready"}
        assert (await client.get("/version")).json() == {"version": penstock.__version__}
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=")
        worker.is_alive, worker.state = False, "restarting"
        for path in ("/health", "/ready"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert "the worker is restarting" in response.json()["error"]["message"]


async def test_requests_are_refused_while_the_gate_is_closed() -> None:
    services, may_finish = make_services(gate=Gate(is_open=False)), asyncio.Event()
    async with app_client(services, make_failing_routes(may_finish)) as client:
        early_response = await client.get("/items/a")
        assert early_response.status_code == 503
        assert early_response.headers["retry-after"] == "1"
        assert "being loaded" in early_response.json()["error"]["message"]
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200

        services.gate.open()
        assert (await client.get("/ready")).status_code == 200
        running_task = asyncio.create_task(client.get("/slow"))
        await wait_until(lambda: services.gate.num_active == 1)
        services.gate.close()
        assert services.gate.num_active == 1
        late_response = await client.get("/items/a")
        assert late_response.status_code == 503
        assert late_response.headers["connection"] == "close"
        assert "shutting down" in late_response.json()["error"]["message"]
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert not await services.gate.wait_until_idle(0.01)
        may_finish.set()
        assert await services.gate.wait_until_idle(60)
        assert (await running_task).json() == "done"
        services.gate.open()
        assert (await client.get("/items/a")).status_code == 503


async def test_only_allowed_origins_get_cors_headers() -> None:
    origin_header = {"origin": "http://a.example"}
    preflight_headers = {**origin_header, "access-control-request-method": "POST"}
    async with app_client(make_services()) as client:
        response = await client.get("/version", headers=origin_header)
        assert "access-control-allow-origin" not in response.headers
        assert (await client.options("/v1/models", headers=preflight_headers)).status_code == 405
    async with app_client(make_services(cors_origins=("http://a.example",), api_key=("k",))) as client:
        allowed_response = await client.get("/v1/nothing", headers=origin_header)
        # Browsers send no key in a preflight request.
        preflight_response = await client.options("/v1/models", headers=preflight_headers)
        other_origin_response = await client.get("/version", headers={"origin": "http://b.example"})
    assert allowed_response.status_code == 401
    assert allowed_response.headers["access-control-allow-origin"] == "http://a.example"
    assert preflight_response.status_code == 200
    assert "access-control-allow-origin" not in other_origin_response.headers


async def test_a_path_with_a_trailing_slash_is_not_redirected() -> None:
    async with app_client(make_services(FakeEngine(), allowed_hosts=["*"])) as client:
        answer = await client.get("/health/", headers={"host": "elsewhere.example"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


JSON = {"content-type": "application/json"}


async def test_every_route_with_a_json_body_refuses_long_bodies_invalid_json_and_plain_text() -> None:
    """Each route with a JSON body must be a `JsonRoute`, which limits the size and refuses invalid JSON."""
    num_checked_routes = 0
    tasks = (PipelineTask.TEXT_GENERATION, PipelineTask.EMBEDDINGS_GENERATION, PipelineTask.AUDIO_GENERATION)
    for task in tasks:
        async with app_client(replace(make_services(max_body_size=10), task=task)) as client:
            document = (await client.get("/openapi.json")).json()
            operations = {
                path: [item[method] for method in ("post", "put", "patch") if method in item]
                for path, item in document["paths"].items()
            }
            paths = [
                path
                for path, methods in operations.items()
                if any("requestBody" in operation for operation in methods)
            ]
            assert len(paths) >= 5
            for path in paths:
                text_response = await client.post(path, content=b"{}", headers={"content-type": "text/plain"})
                if text_response.status_code == 400 and "this model is loaded for" in text_response.text:
                    continue
                num_checked_routes += 1
                assert text_response.status_code == 415, path
                assert (await client.post(path, json="a" * 10)).status_code == 413, path
                assert (await client.post(path, content=b'{"a": NaN}', headers=JSON)).status_code == 400, path
    assert num_checked_routes == len(paths) + 2 * 6  # six routes are checked for all three tasks


async def test_head_requests_have_the_status_of_get_requests() -> None:
    async with app_client(make_services()) as client:
        for path in ("/health", "/v1/models", "/", "/metrics"):
            assert (await client.head(path)).status_code == 200
        assert (await client.head("/v1/completions")).status_code == 405
        assert (await client.head("/nothing")).status_code == 404
        metrics = (await client.get("/metrics")).text
    assert 'method="HEAD",route="/v1/models",status="200"' in metrics


async def test_the_openapi_document_is_served_without_documentation_pages() -> None:
    async with app_client(make_services()) as client:
        document = (await client.get("/openapi.json")).json()
        assert (await client.get("/docs")).status_code == 404
        assert (await client.get("/redoc")).status_code == 404
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= set(document["paths"])


def read_access_log(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the fields of each line of the access log at level INFO or above."""
    return [
        record.fields  # type: ignore[attr-defined]
        for record in caplog.records
        if record.name == "penstock.serve.observability.access_log" and record.levelno >= logging.INFO
    ]


async def get_and_disconnect(app: Any, path: str) -> list[Any]:
    """Send a GET request and disconnect at once. Return the messages that the application sends."""
    sent_messages: list[Any] = []
    received_messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(received_messages)

    async def send(message: Any) -> None:
        sent_messages.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    return sent_messages
