"""Prometheus metrics: one registry an application, nothing global.

What requests did is counted here, as it happens; what the worker does is read from its newest statistics
when somebody looks (`WorkerCollector`). All times are in seconds, measured from the moment when the
request's headers had arrived.

Of requests (probes, ``/health`` and the like, are not counted):

- ``penstock_requests_total`` by ``route``, ``method``, ``status``: requests that ended; 499 where the client
  left before the end, the error's status where a stream broke, otherwise the one sent
- ``penstock_requests_in_progress``: requests that have arrived and not ended
- ``penstock_request_seconds`` by ``route``: histogram, from arrival to the end
- ``penstock_queue_seconds``: histogram, from arrival to a place in the batch
- ``penstock_time_to_first_token_seconds``: histogram, from arrival to the first token
- ``penstock_inter_token_seconds``: histogram, between two tokens of one choice
- ``penstock_prompt_tokens_total``, ``penstock_cached_prompt_tokens_total``,
  ``penstock_completion_tokens_total``: as in ``usage``, when a request ends
- ``penstock_finished_total`` by ``reason``: choices that ended

Of the server: ``penstock_build_info``, ``penstock_startup_seconds`` by ``phase``, ``process_*``. Of the
worker: `WORKER_METRICS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0, generate_latest
from prometheus_client.registry import Collector

from penstock import __version__

if TYPE_CHECKING:
    from penstock.serve.observability.request_record import RequestRecord
    from penstock.worker.engine_client import EngineClient

_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)


class Metrics:
    """The metrics of one application.

    Args:
        with_process: also report memory, processor time and open files of this process.
    """

    content_type = CONTENT_TYPE_PLAIN_1_0_0

    def __init__(self, *, with_process: bool = True) -> None:
        self.registry = CollectorRegistry()
        make: Any = {"registry": self.registry}
        self._requests = Counter(
            "penstock_requests", "Requests that ended", ["route", "method", "status"], **make
        )
        self._in_progress = Gauge(
            "penstock_requests_in_progress", "Requests that have arrived and not ended", **make
        )
        self._total = Histogram(
            "penstock_request_seconds", "From arrival to the end", ["route"], buckets=_LONG, **make
        )
        self._queue = Histogram(
            "penstock_queue_seconds", "From arrival to a place in the batch", buckets=_LONG, **make
        )
        self._first_token = Histogram(
            "penstock_time_to_first_token_seconds",
            "From arrival to the first token",
            buckets=_LONG,
            **make,
        )
        self._inter_token = Histogram(
            "penstock_inter_token_seconds", "Between two tokens of one choice", buckets=_SHORT, **make
        )
        self._prompt = Counter("penstock_prompt_tokens", "Prompt tokens of requests that ended", **make)
        self._cached = Counter(
            "penstock_cached_prompt_tokens", "Prompt tokens of those that were cached", **make
        )
        self._completion = Counter(
            "penstock_completion_tokens", "Generated tokens of requests that ended", **make
        )
        self._finished = Counter("penstock_finished", "Choices that ended, by reason", ["reason"], **make)
        self._build = Info("penstock_build", "What runs here", **make)
        self._startup = Gauge("penstock_startup_seconds", "Seconds of a start-up phase", ["phase"], **make)
        if with_process:
            ProcessCollector(registry=self.registry)
        self.describe_build()

    def request_received(self) -> RequestMetrics:
        """Counts a request in; the middleware alone calls this."""
        return RequestMetrics(self)

    def describe_build(self, **more: str) -> None:
        """Sets the labels of ``penstock_build_info``: the version, and what the caller knows."""
        self._build.info({"version": __version__, **more})

    def report_startup(self, phases: Iterable[tuple[str, float]]) -> None:
        """Sets the seconds of each phase of the start-up."""
        for phase, seconds in phases:
            self._startup.labels(phase).set(seconds)

    def watch(self, worker: EngineClient) -> None:
        """Reports the statistics of a worker too, whenever somebody looks."""
        self.registry.register(WorkerCollector(worker))

    def render(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


class RequestMetrics:
    """The metrics of one request; a `RecordObserver`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._had_token = False
        metrics._in_progress.inc()

    def admitted(self, record: RequestRecord) -> None:
        """The request has a place in the batch."""
        assert record.admitted_at is not None
        self._metrics._queue.observe(record.admitted_at - record.received)

    def tokens(self, record: RequestRecord, count: int, seconds: float | None) -> None:
        """Tokens came; several at once share the time since those before them evenly."""
        if not self._had_token:
            assert record.first_token_at is not None
            self._had_token = True
            self._metrics._first_token.observe(record.first_token_at - record.received)
        if seconds is None:
            return
        for _ in range(count):
            self._metrics._inter_token.observe(seconds / count)

    def finished(self, record: RequestRecord) -> None:
        """The request has ended, in whatever way."""
        metrics = self._metrics
        assert record.ended_at is not None
        metrics._in_progress.dec()
        metrics._requests.labels(record.route, record.method, str(record.final_status)).inc()
        metrics._total.labels(record.route).observe(record.ended_at - record.received)
        metrics._prompt.inc(record.prompt_tokens)
        metrics._cached.inc(record.cached_tokens)
        metrics._completion.inc(record.completion_tokens)
        for reason in record.finish_reasons:
            metrics._finished.labels(reason).inc()


class WorkerCollector(Collector):
    """A worker's newest statistics as metrics. Its totals begin again at 0 with each new worker process."""

    def __init__(self, worker: EngineClient) -> None:
        self._worker = worker

    def describe(self) -> Iterable[Metric]:
        """Nothing: so that registering it does not ask the worker."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of `WORKER_METRICS`."""
        for one in WORKER_METRICS:
            family = CounterMetricFamily if one.name.endswith("_total") else GaugeMetricFamily
            yield family(one.name, one.help, value=float(one.read(self._worker)))


@dataclass(frozen=True, slots=True)
class WorkerMetric:
    """A number that is read from the worker when somebody looks."""

    name: str
    """A counter where it ends in ``_total``, else a gauge."""
    help: str
    read: Callable[[EngineClient], float]


WORKER_METRICS = (
    WorkerMetric("penstock_worker_up", "1 while the worker serves", lambda w: w.state == "ready"),
    WorkerMetric("penstock_worker_restarts_total", "Workers that ended unasked", lambda w: w.num_restarts),
    WorkerMetric(
        "penstock_requests_outstanding", "Requests handed to the worker", lambda w: w.num_outstanding
    ),
    WorkerMetric("penstock_requests_running", "Requests in the batch", lambda w: w.stats.num_running),
    WorkerMetric(
        "penstock_requests_waiting", "Requests that wait for a place", lambda w: w.stats.num_waiting
    ),
    WorkerMetric("penstock_batch_size", "Requests of the last step", lambda w: w.stats.last_batch_size),
    WorkerMetric("penstock_batch_tokens", "Tokens of the last step", lambda w: w.stats.last_batch_tokens),
    WorkerMetric("penstock_steps_total", "Steps that computed something", lambda w: w.stats.num_steps),
    WorkerMetric("penstock_step_seconds_total", "Seconds of all steps", lambda w: w.stats.step_seconds),
    WorkerMetric(
        "penstock_preemptions_total", "Requests sent back to wait", lambda w: w.stats.num_preemptions
    ),
    WorkerMetric("penstock_kv_blocks", "Blocks of the KV cache", lambda w: w.stats.num_blocks),
    WorkerMetric("penstock_kv_blocks_used", "Blocks that requests hold", lambda w: w.stats.num_used_blocks),
    WorkerMetric(
        "penstock_kv_blocks_cached", "Free blocks with a known prefix", lambda w: w.stats.num_cached_blocks
    ),
    WorkerMetric(
        "penstock_prefix_cache_queries_total",
        "Prompt tokens of admitted requests",
        lambda w: w.stats.num_prefix_query_tokens,
    ),
    WorkerMetric(
        "penstock_prefix_cache_hits_total",
        "Those that were in the prefix cache",
        lambda w: w.stats.num_prefix_hit_tokens,
    ),
    WorkerMetric(
        "penstock_prefilled_tokens_total",
        "Prompt tokens of requests whose prompt is computed",
        lambda w: w.stats.num_prompt_tokens,
    ),
    WorkerMetric(
        "penstock_generated_tokens_total",
        "Tokens sampled and kept, those that end a text and those behind a stop string included",
        lambda w: w.stats.num_generated_tokens,
    ),
    WorkerMetric(
        "penstock_draft_tokens_total", "Tokens proposed by speculation", lambda w: w.stats.num_draft_tokens
    ),
    WorkerMetric(
        "penstock_draft_tokens_accepted_total",
        "Those that the model accepted",
        lambda w: w.stats.num_accepted_draft_tokens,
    ),
    WorkerMetric(
        "penstock_draft_verifications_total",
        "Forwards of a request that had drafts",
        lambda w: w.stats.num_verified_steps,
    ),
)
