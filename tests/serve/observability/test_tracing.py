"""Each request except probes is one span. The span joins the trace that the request's header names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from fastapi import APIRouter, Request
from support.app_client import app_client, make_services

from penstock.errors import MissingDependencyError
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.observability.tracing import Tracing

export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
sdk = pytest.importorskip("opentelemetry.sdk.trace")


@pytest.fixture
def exporter_and_tracing() -> Iterator[tuple[object, Tracing]]:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter, provider = export.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield exporter, Tracing(provider)
    provider.shutdown()


def make_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/items/{name}")
    async def item(request: Request) -> None:
        record = RequestRecord.of(request)
        record.model, record.prompt_tokens, record.completion_tokens = "demo", 5, 3
        record.admitted()
        record.tokens(1)
        record.tokens(2)
        record.finish_reasons = ["stop"]

    @router.get("/raise_bug")
    async def raise_bug() -> None:
        raise ZeroDivisionError

    return router


async def test_each_request_except_probes_is_a_span(
    exporter_and_tracing: tuple[export.InMemorySpanExporter, Tracing],
) -> None:
    exporter, tracing = exporter_and_tracing
    async with app_client(make_services(tracing=tracing), make_routes()) as client:
        await client.get("/items/a", headers={"x-request-id": "abc"})
        await client.get("/health")
    [span] = exporter.get_finished_spans()
    assert span.name == "penstock.request"
    assert span.parent is None
    assert [event.name for event in span.events] == ["admitted", "first_token"]
    attributes = dict(span.attributes)
    assert attributes.pop("penstock.queue_seconds") >= 0
    assert attributes.pop("penstock.time_to_first_token_seconds") >= 0
    assert attributes == {
        "penstock.request_id": "abc",
        "http.request.method": "GET",
        "http.route": "/items/{name}",
        "http.response.status_code": 200,
        "gen_ai.request.model": "demo",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.cached_tokens": 0,
        "gen_ai.usage.output_tokens": 3,
    }
    assert span.status.is_unset


async def test_the_span_is_part_of_the_callers_trace(
    exporter_and_tracing: tuple[export.InMemorySpanExporter, Tracing],
) -> None:
    exporter, tracing = exporter_and_tracing
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with app_client(make_services(tracing=tracing), make_routes()) as client:
        await client.get("/items/a", headers={"traceparent": f"00-{trace_id}-{parent_id}-01"})
        await client.get("/items/a", headers={"traceparent": "nonsense"})
    first_span, second_span = exporter.get_finished_spans()
    assert f"{first_span.context.trace_id:032x}" == trace_id
    assert f"{first_span.parent.span_id:016x}" == parent_id
    assert second_span.parent is None


async def test_a_failure_is_recorded_in_the_span(
    exporter_and_tracing: tuple[export.InMemorySpanExporter, Tracing],
) -> None:
    exporter, tracing = exporter_and_tracing
    async with app_client(make_services(tracing=tracing), make_routes()) as client:
        await client.get("/raise_bug")
    [span] = exporter.get_finished_spans()
    assert not span.status.is_ok
    assert span.status.description == "error:internal_error"
    assert span.attributes["http.response.status_code"] == 500


def test_importing_the_server_does_not_import_the_sdk() -> None:
    # FastAPI imports the OpenTelemetry API, but the SDK must not be imported.
    code = (
        "import sys, penstock.serve.app, penstock.serve.http.lifecycle, penstock.serve.observability.tracing;"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_tracing_to_an_unreachable_endpoint_starts_and_closes() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    Tracing.to_endpoint("http://127.0.0.1:9/v1/traces").close()  # no server listens at this address


def test_a_missing_package_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingDependencyError, match=r"penstock-llm\[otel\]"):
        Tracing.to_endpoint("http://127.0.0.1:4318/v1/traces")
