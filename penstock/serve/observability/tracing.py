"""OpenTelemetry spans: one per request, with events for its admission and its first token.

Needs the packages of the extra ``otel``, which this module imports only with ``--otlp-endpoint``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.errors import MissingDependencyError
from penstock.serve.observability.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span


class Tracing:
    """Creates one span per request. A ``traceparent`` header adds the request's span to the caller's trace.

    Args:
        provider: receives the spans.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("penstock", __version__)

    @classmethod
    def to_endpoint(cls, endpoint: str) -> Tracing:
        """Return a `Tracing` that sends spans in batches, by OTLP over HTTP, from a separate thread.

        Args:
            endpoint: the complete URL, such as ``http://127.0.0.1:4318/v1/traces``.

        Raises:
            MissingDependencyError: the extra ``otel`` is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise MissingDependencyError(
                error.name or "opentelemetry", "otel", "sending spans (--otlp-endpoint)"
            ) from error
        provider = TracerProvider(resource=Resource.create({"service.name": "penstock"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def begin(self, record: RequestRecord, headers: Iterable[tuple[bytes, bytes]]) -> RequestSpan:
        """Start the span of a request that has arrived."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        context = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span("penstock.request", context, SpanKind.SERVER)
        span.set_attribute("penstock.request_id", record.request_id)
        return RequestSpan(span)

    def close(self) -> None:
        """Send all remaining spans, and accept no more spans."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one request; a `RecordObserver`.

    The span's events divide the request into queue (until ``admitted``), prefill (until ``first_token``) and
    decode.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        self._had_token = False

    def admitted(self, record: RequestRecord) -> None:
        """Add the event of the admission."""
        self._span.add_event("admitted")

    def tokens(self, record: RequestRecord, count: int, seconds: float | None) -> None:
        """Add an event for the first token."""
        if not self._had_token:
            self._had_token = True
            self._span.add_event("first_token")

    def finished(self, record: RequestRecord) -> None:
        """Set the attributes of the request and end the span."""
        from opentelemetry.trace import StatusCode

        attributes: dict[str, str | int | float | Sequence[str] | None] = {
            "http.request.method": record.method,
            "http.route": record.route,
            "http.response.status_code": record.final_status,
            "gen_ai.request.model": record.model,
            "gen_ai.response.finish_reasons": tuple(record.finish_reasons) or None,
            "gen_ai.usage.input_tokens": record.prompt_tokens if record.model else None,
            "gen_ai.usage.cached_tokens": record.cached_tokens if record.model else None,
            "gen_ai.usage.output_tokens": record.completion_tokens if record.model else None,
            "penstock.queue_seconds": record.seconds_until(record.admitted_at),
            "penstock.time_to_first_token_seconds": record.seconds_until(record.first_token_at),
        }
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if record.error_status is not None or record.client_left:
            self._span.set_status(StatusCode.ERROR, record.outcome)
        self._span.end(time.time_ns())
