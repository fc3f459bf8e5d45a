"""Metrics of requests with known token counts and times, and of workers with known statistics."""

from __future__ import annotations

import sys
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.app_client import app_client, make_services
from support.engines import FakeEngine
from support.in_process_server import run_in_process

import penstock
from penstock.serve.observability.metrics import ENGINE_METRICS, Metrics, RequestMetrics
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.observability.router_gauges import parse_gauges
from penstock.worker.messages import WorkerStats
from penstock.worker.router import WorkerRouter


class Clock:
    """A fake clock that tests advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("penstock.serve.observability.request_record.time.perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def read_samples(metrics: Metrics) -> dict[str, float]:
    """Return the value of each sample by its name and labels, without creation times."""
    text = metrics.render().decode()
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def begin_request(metrics: Metrics, route: str = "/v1/completions") -> tuple[RequestRecord, RequestMetrics]:
    start_time = time.perf_counter()  # a test may replace the clock
    record, observer = RequestRecord("x", "POST", route, start_time), metrics.request_received()
    record.observers.append(observer)
    return record, observer


def test_histograms_contain_the_timings_of_a_request(clock: Clock) -> None:
    metrics = Metrics(reports_process=False)
    record, observer = begin_request(metrics)
    assert read_samples(metrics)["penstock_requests_in_progress"] == 1
    clock.now += 0.3
    record.admitted()
    record.admitted()  # the admission of a second choice is not counted
    clock.now += 0.4
    record.tokens(1, choice=0)
    clock.now += 0.02
    record.tokens(1, choice=1)  # the first token of choice 1 has no previous token
    clock.now += 0.06
    record.tokens(4, choice=0)  # 0.08 s after the last token of choice 0
    record.tokens(0, choice=1)
    record.status, record.prompt_tokens, record.cached_tokens, record.completion_tokens = 200, 10, 8, 6
    record.finish_reasons = ["stop", "length"]
    clock.now += 1.22
    record.ended_at = clock.now
    observer.finished(record)

    values = read_samples(metrics)
    assert values["penstock_requests_in_progress"] == 0
    assert values["penstock_requests_total method=POST route=/v1/completions status=200"] == 1
    assert values["penstock_queue_seconds_count"] == 1
    assert values["penstock_queue_seconds_sum"] == pytest.approx(0.3)
    assert values["penstock_time_to_first_token_seconds_count"] == 1
    assert values["penstock_time_to_first_token_seconds_sum"] == pytest.approx(0.7)
    assert values["penstock_inter_token_seconds_count"] == 4
    assert values["penstock_inter_token_seconds_sum"] == pytest.approx(0.08)
    assert values["penstock_inter_token_seconds_bucket le=0.01"] == 0
    assert values["penstock_inter_token_seconds_bucket le=0.03"] == 4
    assert values["penstock_request_seconds_sum route=/v1/completions"] == pytest.approx(2.0)
    assert values["penstock_prompt_tokens_total"] == 10
    assert values["penstock_cached_prompt_tokens_total"] == 8
    assert values["penstock_completion_tokens_total"] == 6
    assert values["penstock_finished_total reason=stop"] == 1
    assert values["penstock_finished_total reason=length"] == 1


@pytest.mark.parametrize(
    ("sent_status", "error", "client_left", "status", "outcome"),
    [
        (200, None, False, "200", "-"),
        (429, ("rate_limit_exceeded", 429), False, "429", "error:rate_limit_exceeded"),
        (200, ("service_unavailable", 503), False, "503", "error:service_unavailable"),
        (200, (None, 503), True, "499", "abort:client_disconnect"),
        (None, None, True, "499", "abort:client_disconnect"),
        (400, (None, 400), False, "400", "error:400"),
    ],
)
def test_each_outcome_has_its_status_label(
    sent_status: int | None,
    error: tuple[str | None, int] | None,
    client_left: bool,
    status: str,
    outcome: str,
) -> None:
    metrics = Metrics(reports_process=False)
    record, observer = begin_request(metrics)
    record.status, record.client_left, record.ended_at = sent_status, client_left, record.received_at + 1
    if error is not None:
        record.failed(*error)
    observer.finished(record)
    assert (
        read_samples(metrics)[f"penstock_requests_total method=POST route=/v1/completions status={status}"]
        == 1
    )
    assert record.outcome == outcome


def test_statistics_of_the_worker_become_metrics() -> None:
    stats = WorkerStats(
        num_running=1,
        num_waiting=2,
        num_blocks=30,
        num_used_blocks=4,
        num_cached_blocks=5,
        num_preemptions=6,
        num_prefix_query_tokens=70,
        num_prefix_hit_tokens=8,
        num_prompt_tokens=90,
        num_generated_tokens=10,
        num_steps=11,
        step_seconds=1.5,
        last_batch_size=12,
        last_batch_tokens=13,
        num_draft_tokens=14,
        num_accepted_draft_tokens=9,
        num_verified_steps=7,
        num_encoded_images=15,
        num_cached_images=16,
    )
    metrics, worker = (
        Metrics(reports_process=False),
        FakeEngine(stats=stats, num_outstanding=3, num_restarts=2),
    )
    metrics.add_engine(worker)
    values = read_samples(metrics)
    assert {metric.name: values[metric.name] for metric in ENGINE_METRICS} == {
        "penstock_worker_up": 1,
        "penstock_worker_restarts_total": 2,
        "penstock_requests_outstanding": 3,
        "penstock_requests_running": 1,
        "penstock_requests_waiting": 2,
        "penstock_batch_size": 12,
        "penstock_batch_tokens": 13,
        "penstock_steps_total": 11,
        "penstock_step_seconds_total": 1.5,
        "penstock_encoded_images_total": 15,
        "penstock_encoder_cache_hits_total": 16,
        "penstock_preemptions_total": 6,
        "penstock_kv_blocks": 30,
        "penstock_kv_blocks_used": 4,
        "penstock_kv_cache_usage": 4 / 30,
        "penstock_adapters_loaded": 0,
        "penstock_kv_blocks_cached": 5,
        "penstock_prefix_cache_queries_total": 70,
        "penstock_prefix_cache_hits_total": 8,
        "penstock_prefilled_tokens_total": 90,
        "penstock_generated_tokens_total": 10,
        "penstock_draft_tokens_total": 14,
        "penstock_draft_tokens_accepted_total": 9,
        "penstock_draft_verifications_total": 7,
    }
    worker.state, worker.stats = "restarting", WorkerStats()
    assert read_samples(metrics)["penstock_worker_up"] == 0
    assert read_samples(metrics)["penstock_kv_blocks"] == 0


def test_metrics_of_several_workers_are_sums_and_values_per_worker() -> None:
    metrics = Metrics(reports_process=False)
    workers = [
        FakeEngine(stats=WorkerStats(num_running=1, num_steps=10)),
        FakeEngine(stats=WorkerStats(num_running=2, num_steps=5), state="restarting"),
    ]
    metrics.add_engine(WorkerRouter(workers))
    values = read_samples(metrics)
    assert values["penstock_requests_running"] == 3
    assert values["penstock_per_worker_requests_running worker=0"] == 1
    assert values["penstock_per_worker_requests_running worker=1"] == 2
    assert values["penstock_per_worker_steps_total worker=1"] == 5
    assert (values["penstock_worker_up"], values["penstock_per_worker_up worker=1"]) == (1, 0)


def test_gauges_for_external_routers_have_the_configured_names() -> None:
    metrics = Metrics(reports_process=False)
    stats = WorkerStats(num_running=1, num_waiting=2, num_blocks=8, num_used_blocks=2)
    names = [
        "waiting=vllm:num_requests_waiting",
        "running=r",
        "kv_usage=kv",
        "adapters=vllm:lora_requests_info",
    ]
    metrics.add_engine(FakeEngine(stats=stats, adapters={"b": "/b", "a": "/a"}), parse_gauges(names), "m")
    samples = read_samples(metrics)
    values = [samples[f"{name} model_name=m"] for name in ("vllm:num_requests_waiting", "r", "kv")]
    assert values == [2, 1, 0.25]
    labels = "max_lora=2 model_name=m running_lora_adapters=a,b waiting_lora_adapters="
    assert samples[f"vllm:lora_requests_info {labels}"] == 1


def test_each_metric_has_a_help_text_and_is_described_in_the_module() -> None:
    metrics = Metrics()
    metrics.add_engine(FakeEngine())
    documentation = sys.modules[Metrics.__module__].__doc__ or ""
    engine_metric_names = {metric.name for metric in ENGINE_METRICS}
    for family in text_string_to_metric_families(metrics.render().decode()):
        if family.name.endswith("_created"):  # creation times of counters
            continue
        assert family.documentation
        is_described = (
            family.name in documentation or {family.name, f"{family.name}_total"} & engine_metric_names
        )
        assert is_described or family.name.startswith("process_"), family.name


def test_metrics_report_the_build_and_startup_times() -> None:
    metrics = Metrics()
    metrics.describe_build(model="demo", isa="avx2")
    metrics.report_startup([("load weights", 0.5)])
    values = read_samples(metrics)
    assert values[f"penstock_build_info isa=avx2 model=demo version={penstock.__version__}"] == 1
    assert values["penstock_startup_seconds phase=load weights"] == 0.5
    assert values["process_resident_memory_bytes"] > 0


async def test_requests_are_counted_by_route_and_status() -> None:
    """Probes are not counted. All unknown paths have the same label. Applications do not share metrics."""
    services, other_services = make_services(api_key=("k",)), make_services()
    key_header = {"authorization": "Bearer k"}
    async with app_client(services) as client:
        for _ in range(3):
            await client.get("/health")
        await client.get("/v1/models", headers=key_header)
        for number in range(5):
            await client.get(f"/nowhere/{number}", headers=key_header)
        await client.get("/v1/models")
        await client.request("BREW", "/v1/models", headers=key_header)
    values = {
        name: value for name, value in read_samples(services.metrics).items() if "requests_total" in name
    }
    assert values == {
        "penstock_requests_total method=GET route=/v1/models status=200": 1,
        "penstock_requests_total method=GET route=unmatched status=404": 5,
        "penstock_requests_total method=GET route=unmatched status=401": 1,
        "penstock_requests_total method=other route=/v1/models status=405": 1,
    }
    assert read_samples(services.metrics)["penstock_requests_in_progress"] == 0
    assert not any("requests_total" in name for name in read_samples(other_services.metrics))


async def test_metrics_count_a_served_workload() -> None:
    """The model always generates ``Hello!`` and EOS: seven tokens."""
    async with run_in_process() as server:
        server.services.metrics.add_engine(server.services.worker)
        await server.complete(prompt="abc", max_tokens=50)
        await server.complete(prompt=["abcd", "ab"], n=2, max_tokens=3)
        stream = await server.post("/v1/completions", prompt="abcde", stream=True, max_tokens=50)
        assert stream.text.endswith("data: [DONE]\n\n")
        assert (await server.post("/v1/completions", prompt="a", temperature=9)).status_code == 400
        assert (await server.post("/v1/completions", prompt="a", model="x")).status_code == 404
        values = read_samples(server.services.metrics)
    route = "penstock_requests_total method=POST route=/v1/completions status="
    assert {name: value for name, value in values.items() if name.startswith(route)} == {
        f"{route}200": 3,
        f"{route}400": 1,
        f"{route}404": 1,
    }
    assert values["penstock_prompt_tokens_total"] == 3 + 4 + 2 + 5
    assert values["penstock_completion_tokens_total"] == 7 + 4 * 3 + 7
    assert values["penstock_finished_total reason=stop"] == 2
    assert values["penstock_finished_total reason=length"] == 4
    assert values["penstock_queue_seconds_count"] == 3
    assert values["penstock_time_to_first_token_seconds_count"] == 3
    assert values["penstock_inter_token_seconds_count"] <= 6 + 4 * 2 + 6
    assert values["penstock_request_seconds_count route=/v1/completions"] == 5
    assert values["penstock_requests_in_progress"] == 0
    assert values["penstock_requests_outstanding"] == 0
    assert values["penstock_generated_tokens_total"] == 7 + 4 * 3 + 7
    assert values["penstock_worker_up"] == 1
