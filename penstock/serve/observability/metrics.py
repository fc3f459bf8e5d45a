"""Prometheus metrics: one registry per application, no global state.

Metrics of requests are updated at each event of a request. Metrics of the engine are read from its newest
statistics at each scrape (`EngineCollector`). All times are in seconds. The arrival of a request is the
arrival of its headers.

Metrics of requests (probes such as ``/health`` are not counted):

- ``penstock_requests_total`` by ``route``, ``method``, ``status``: requests that ended; ``status`` is
  `RequestRecord.final_status`
- ``penstock_requests_in_progress``: requests that have arrived and not ended
- ``penstock_request_seconds`` by ``route``: histogram, from arrival to the end
- ``penstock_queue_seconds``: histogram, from arrival to admission into the batch
- ``penstock_time_to_first_token_seconds``: histogram, from arrival to the first token
- ``penstock_inter_token_seconds``: histogram, time between two tokens of one choice
- ``penstock_prompt_tokens_total``, ``penstock_cached_prompt_tokens_total``,
  ``penstock_completion_tokens_total``: as in ``usage``, counted when a request ends
- ``penstock_image_preparation_seconds``: histogram, duration of the preparation of a request with images
- ``penstock_time_to_first_audio_seconds``: histogram, from arrival to the first audio
- ``penstock_real_time_factor``: histogram, seconds from arrival to the last audio, per second of audio
- ``penstock_audio_seconds_total``: duration of the generated audio
- ``penstock_finished_total`` by ``reason``: choices that ended

Metrics of the server: ``penstock_build_info``, ``penstock_startup_seconds`` by ``phase``, ``process_*``.
Metrics of the engine: `ENGINE_METRICS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0, generate_latest
from prometheus_client.registry import Collector

from penstock import __version__
from penstock.serve.observability.router_gauges import kv_usage, router_gauges

if TYPE_CHECKING:
    from penstock.serve.observability.request_record import RequestRecord
    from penstock.worker.engine_client import EngineClient

_REQUEST_SECONDS_BUCKETS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
    160,
    320,
    640,
)
_INTER_TOKEN_SECONDS_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    10,
)

_REAL_TIME_FACTOR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 50)


class Metrics:
    """The metrics of one application.

    Args:
        reports_process: also report memory, CPU time and open files of this process.
    """

    content_type = CONTENT_TYPE_PLAIN_1_0_0

    def __init__(self, *, reports_process: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._engines: dict[str, EngineClient] = {}
        self._requests = self._counter(
            "penstock_requests", "Requests that ended", ["route", "method", "status"]
        )
        self._in_progress = Gauge(
            "penstock_requests_in_progress",
            "Requests that have arrived and not ended",
            registry=self.registry,
        )
        self._request_seconds = self._histogram(
            "penstock_request_seconds", "From arrival to the end", ["route"]
        )
        self._queue_seconds = self._histogram(
            "penstock_queue_seconds", "From arrival to admission into the batch"
        )
        self._time_to_first_token = self._histogram(
            "penstock_time_to_first_token_seconds", "From arrival to the first token"
        )
        self._inter_token_latency = self._histogram(
            "penstock_inter_token_seconds",
            "Time between two tokens of one choice",
            buckets=_INTER_TOKEN_SECONDS_BUCKETS,
        )
        self._image_preparation = self._histogram(
            "penstock_image_preparation_seconds",
            "Duration of the preparation of a request with images",
        )
        self._prompt_tokens = self._counter("penstock_prompt_tokens", "Prompt tokens of requests that ended")
        self._cached_tokens = self._counter(
            "penstock_cached_prompt_tokens",
            "Prompt tokens of requests that ended, found in the prefix cache",
        )
        self._completion_tokens = self._counter(
            "penstock_completion_tokens", "Generated tokens of requests that ended"
        )
        self._time_to_first_audio = self._histogram(
            "penstock_time_to_first_audio_seconds", "From arrival to the first audio"
        )
        self._real_time_factor = self._histogram(
            "penstock_real_time_factor",
            "Seconds from arrival to the last audio, per second of audio",
            buckets=_REAL_TIME_FACTOR_BUCKETS,
        )
        self._audio_seconds = self._counter("penstock_audio_seconds", "Duration of the generated audio")
        self._finished_choices = self._counter(
            "penstock_finished", "Choices that ended, by reason", ["reason"]
        )
        self._build_info = Info(
            "penstock_build", "Version, model and instruction set of the kernels", registry=self.registry
        )
        self._startup_seconds = Gauge(
            "penstock_startup_seconds", "Seconds of a start-up phase", ["phase"], registry=self.registry
        )
        if reports_process:
            ProcessCollector(registry=self.registry)
        self.describe_build()

    def _counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, help, labels, registry=self.registry)

    def _histogram(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = _REQUEST_SECONDS_BUCKETS,
    ) -> Histogram:
        return Histogram(name, help, labels, registry=self.registry, buckets=buckets)

    def request_received(self) -> RequestMetrics:
        """Count the arrival of a request and return its metrics. Only the middleware calls this method."""
        return RequestMetrics(self)

    def images_prepared(self, seconds: float) -> None:
        """Record the duration of the preparation of a request with images, even if the preparation failed."""
        self._image_preparation.observe(seconds)

    def describe_build(self, **labels: str) -> None:
        """Set the labels of ``penstock_build_info``: the version and ``labels``."""
        self._build_info.info({"version": __version__, **labels})

    def report_startup(self, phases: Iterable[tuple[str, float]]) -> None:
        """Set the seconds of each start-up phase.

        Args:
            phases: (name, seconds) of each phase.
        """
        for phase, seconds in phases:
            self._startup_seconds.labels(phase).set(seconds)

    def add_engine(
        self, engine: EngineClient, gauges: Mapping[str, str] | None = None, model: str = ""
    ) -> None:
        """Add the metrics of an engine. With several engines, the metrics have the label ``model``.

        Args:
            engine: the engine.
            gauges: quantity -> additional gauge name, the argument of `router_gauges`. Only the first call's
                gauges are used.
            model: the name of the engine's model.
        """
        if not self._engines:
            self.registry.register(EngineCollector(self._engines, gauges or {}))
        self._engines[model] = engine

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class RequestMetrics:
    """The metrics of one request; a `RecordObserver`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._had_token = False
        metrics._in_progress.inc()

    def admitted(self, record: RequestRecord) -> None:
        """Record the admission into the batch."""
        assert record.admitted_at is not None
        self._metrics._queue_seconds.observe(record.admitted_at - record.received_at)

    def tokens(self, record: RequestRecord, count: int, seconds: float | None) -> None:
        """Record new tokens. The time since the previous tokens is divided evenly among the new tokens."""
        if not self._had_token:
            assert record.first_token_at is not None
            self._had_token = True
            self._metrics._time_to_first_token.observe(record.first_token_at - record.received_at)
        if seconds is None:
            return
        for _ in range(count):
            self._metrics._inter_token_latency.observe(seconds / count)

    def finished(self, record: RequestRecord) -> None:
        """Record the end of the request."""
        metrics = self._metrics
        assert record.ended_at is not None
        metrics._in_progress.dec()
        metrics._requests.labels(record.route, record.method, str(record.final_status)).inc()
        metrics._request_seconds.labels(record.route).observe(record.ended_at - record.received_at)
        metrics._prompt_tokens.inc(record.prompt_tokens)
        metrics._cached_tokens.inc(record.cached_tokens)
        metrics._completion_tokens.inc(record.completion_tokens)
        if record.audio_seconds:
            assert record.first_audio_at is not None
            assert record.last_audio_at is not None
            metrics._time_to_first_audio.observe(record.first_audio_at - record.received_at)
            metrics._real_time_factor.observe(
                (record.last_audio_at - record.received_at) / record.audio_seconds
            )
            metrics._audio_seconds.inc(record.audio_seconds)
        for reason in record.finish_reasons:
            metrics._finished_choices.labels(reason).inc()


class EngineCollector(Collector):
    """Reports the newest statistics of the engines as metrics.

    Totals of a worker's statistics restart at 0 when the worker restarts.
    """

    def __init__(self, engines: Mapping[str, EngineClient], gauges: Mapping[str, str]) -> None:
        self._engines = engines
        self._gauges = gauges

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, so that the registration does not read the statistics."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of `ENGINE_METRICS` and the router gauges.

        If an engine has several workers, also yield each metric of `ENGINE_METRICS` per worker.
        """
        label_names = ["model"] if len(self._engines) > 1 else []
        has_several_workers = any(len(engine.workers) > 1 for engine in self._engines.values())
        for metric in ENGINE_METRICS:
            family_class = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
            totals = family_class(metric.name, metric.help, labels=label_names)
            name = metric.name.removeprefix("penstock_").removeprefix("worker_")
            per_worker = family_class(
                f"penstock_per_worker_{name}",
                f"{metric.help}, of each worker",
                labels=[*label_names, "worker"],
            )
            for model, engine in self._engines.items():
                labels = [model] if label_names else []
                totals.add_metric(labels, float(metric.read(engine)))
                for worker_index, worker in enumerate(engine.workers):
                    per_worker.add_metric([*labels, str(worker_index)], float(metric.read(worker)))
            yield totals
            if has_several_workers:
                yield per_worker
        yield from router_gauges(self._engines, self._gauges)


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """A number that is read from the engine at each scrape."""

    name: str
    """The metric is a counter if the name ends in ``_total``, else a gauge."""
    help: str
    read: Callable[[EngineClient], float]


ENGINE_METRICS = (
    EngineMetric("penstock_worker_up", "1 while the worker is ready", lambda engine: engine.state == "ready"),
    EngineMetric(
        "penstock_worker_restarts_total",
        "Unexpected ends of the worker, and failed restarts",
        lambda engine: engine.num_restarts,
    ),
    EngineMetric(
        "penstock_requests_outstanding", "Requests that run or wait", lambda engine: engine.num_outstanding
    ),
    EngineMetric(
        "penstock_requests_running", "Requests in the batch", lambda engine: engine.stats.num_running
    ),
    EngineMetric(
        "penstock_requests_waiting",
        "Requests that wait for admission",
        lambda engine: engine.stats.num_waiting,
    ),
    EngineMetric(
        "penstock_batch_size", "Requests in the last step", lambda engine: engine.stats.last_batch_size
    ),
    EngineMetric(
        "penstock_batch_tokens",
        "Input tokens of the last step's first forward pass",
        lambda engine: engine.stats.last_batch_tokens,
    ),
    EngineMetric(
        "penstock_steps_total", "Steps with at least one request", lambda engine: engine.stats.num_steps
    ),
    EngineMetric(
        "penstock_step_seconds_total", "Total duration of all steps", lambda engine: engine.stats.step_seconds
    ),
    EngineMetric(
        "penstock_encoded_images_total",
        "Images that the vision encoder has encoded",
        lambda engine: engine.stats.num_encoded_images,
    ),
    EngineMetric(
        "penstock_encoder_cache_hits_total",
        "Images whose encoder outputs were in the encoder cache",
        lambda engine: engine.stats.num_cached_images,
    ),
    EngineMetric(
        "penstock_preemptions_total", "Preemptions of requests", lambda engine: engine.stats.num_preemptions
    ),
    EngineMetric("penstock_kv_blocks", "Blocks of the KV cache", lambda engine: engine.stats.num_blocks),
    EngineMetric("penstock_kv_cache_usage", "Used fraction of the KV cache, 0 to 1", kv_usage),
    EngineMetric("penstock_adapters_loaded", "Loaded LoRA adapters", lambda engine: len(engine.adapters)),
    EngineMetric(
        "penstock_kv_blocks_used", "Blocks in use by requests", lambda engine: engine.stats.num_used_blocks
    ),
    EngineMetric(
        "penstock_kv_blocks_cached",
        "Free blocks in the prefix cache, which prompts can reuse",
        lambda engine: engine.stats.num_cached_blocks,
    ),
    EngineMetric(
        "penstock_prefix_cache_queries_total",
        "Prompt tokens of admitted requests, except requests for log probabilities of the prompt",
        lambda engine: engine.stats.num_prefix_query_tokens,
    ),
    EngineMetric(
        "penstock_prefix_cache_hits_total",
        "Prompt tokens found in the prefix cache at admission",
        lambda engine: engine.stats.num_prefix_hit_tokens,
    ),
    EngineMetric(
        "penstock_prefilled_tokens_total",
        "Prompt tokens of all admitted requests",
        lambda engine: engine.stats.num_prompt_tokens,
    ),
    EngineMetric(
        "penstock_generated_tokens_total",
        "Tokens sampled and kept, end-of-sequence tokens and tokens after a stop string included",
        lambda engine: engine.stats.num_generated_tokens,
    ),
    EngineMetric(
        "penstock_draft_tokens_total",
        "Draft tokens proposed by speculative decoding",
        lambda engine: engine.stats.num_draft_tokens,
    ),
    EngineMetric(
        "penstock_draft_tokens_accepted_total",
        "Draft tokens that the model accepted",
        lambda engine: engine.stats.num_accepted_draft_tokens,
    ),
    EngineMetric(
        "penstock_draft_verifications_total",
        "Verifications of drafts, counted once per request and forward pass",
        lambda engine: engine.stats.num_verified_steps,
    ),
)
