"""Simulate 1 to 256 workers behind one router, and find where the router saturates.

    python benchmarks/cluster.py simulate                     # prefix-aware, least loaded, random routing
    python benchmarks/cluster.py simulate --speed 30 --workers 64 256
    python benchmarks/cluster.py saturate --speed 30          # decisions per second of the router
    python benchmarks/cluster.py measure --shape l110m -o benchmarks/cluster_costs.json

``simulate`` runs a trace through the real router, schedulers and KV caches in virtual time
(`penstock.bench.simulation`). The durations of model steps come from a file that ``measure`` writes. The
request rate per worker is ``--load`` times the rate that a worker can serve without a prefix cache. The first
quarter of the trace is a warm-up; its requests are not in the results. ``--speed N`` simulates workers that
are N times as fast as the measured worker.

``saturate`` measures the CPU time of the real router per decision and per report. ``measure`` needs an idle
machine."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

import msgspec
import numpy as np
from against_transformers import describe_machine
from router import measure_decisions

from penstock.bench.random_weights import SHAPES, write_random_checkpoint
from penstock.bench.simulation.cluster import POLICIES, Cluster, capacity
from penstock.bench.simulation.costs import ClusterCosts, RouterCosts, non_negative_least_squares
from penstock.bench.simulation.measure import measure_steps
from penstock.bench.simulation.trace import TraceParameters, make_trace
from penstock.config import PipelineConfig
from penstock.worker.messages import StepResults, TextResult, WorkerStats, report_decoder, report_encoder
from penstock.worker.results import Generation

COSTS_FILE = Path(__file__).with_name("cluster_costs.json")
WORKER_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TARGET_RATE = 20_000
"""Decisions per second that one router should reach, without the computation of block digests."""
_NUM_PREFIXES = 50
_NUM_DECISIONS = 2000


def main() -> None:
    """Run ``simulate``, ``saturate`` or ``measure``, as the command line selects."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("simulate", "saturate", "measure"))
    parser.add_argument("--costs", type=Path, default=COSTS_FILE)
    parser.add_argument("--workers", nargs="+", type=int, default=WORKER_COUNTS)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument(
        "--requests", type=int, default=100, help="requests per worker; the trace has at least 800"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the reports of simulate to this file")
    parser.add_argument("--shape", choices=SHAPES, default="l110m")
    parser.add_argument("--model", help="measure this checkpoint instead of random weights")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--kv-cache-memory", default="1GiB")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options)
    elif options.command == "saturate":
        saturate(options)
    else:
        simulate(options)


def simulate(options: argparse.Namespace) -> None:
    """Print one row per number of workers and routing policy. With ``--json``, also write the reports."""
    costs = ClusterCosts.read(options.costs)
    costs = msgspec.structs.replace(costs, step=costs.step.scaled(options.speed))
    parameters = TraceParameters(
        rate=1.0, num_requests=2000, max_length=costs.limits.max_length, seed=options.seed
    )
    rate = options.load * capacity(costs, parameters)
    print(f"{costs.measured.get('model', '')}; {rate:.2f} requests/s for each worker")
    print("workers  routing        req/s  tokens/s   first token p50, p99    latency p50, p99  hits  busy")
    rows = []
    for count in options.workers:
        num_requests = max(options.requests * count, 800)
        trace = make_trace(replace(parameters, rate=rate * count, num_requests=num_requests))
        for policy in options.policies:
            begin = time.perf_counter()
            report = Cluster(costs, count, policy).run(trace)
            rows.append(asdict(report) | {"real_seconds": time.perf_counter() - begin})
            first, latency = report.first_token_latency, report.latency
            print(
                f"{count:7}  {policy:12} {report.requests_per_second:7.1f} {report.tokens_per_second:9,.0f} "
                f"{first[0]:13.3f} s {first[1]:6.3f} s {latency[0]:8.2f} s {latency[1]:6.2f} s "
                f"{report.hit_rate:4.0%} {report.worker_utilization:5.0%}, "
                f"router {report.router_utilization:.1%}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"costs": msgspec.to_builtins(costs), "reports": rows}, indent=1))


def saturate(options: argparse.Namespace) -> None:
    """Print the decisions per second and the CPU load of a router, for each number of workers above 1."""
    costs = ClusterCosts.read(options.costs)
    step = costs.step.scaled(options.speed)
    parameters = TraceParameters(
        rate=1.0, num_requests=2000, max_length=costs.limits.max_length, seed=options.seed
    )
    request_rate = capacity(msgspec.structs.replace(costs, step=step), parameters)
    trace = make_trace(parameters)
    answer_length = np.mean([turn.num_new_tokens for conversation in trace for turn in conversation.turns])
    print(
        f"{describe_machine()}\n{request_rate:.2f} requests/s for each worker, "
        f"{answer_length:.0f} tokens per answer"
    )
    print("workers  decisions/s: digests known  with hashing  needed  load of the router's thread")
    router, reports_per_second = measure_router(options.workers), 1 / 0.02
    for count in (count for count in options.workers if count > 1):  # one worker needs no decision
        known_digests_rate, hashing_rate = measure_decisions(count, _NUM_PREFIXES, 2048, _NUM_DECISIONS)
        results_per_report = request_rate * answer_length / reports_per_second  # of one worker
        load = count * (
            request_rate * router.decision_seconds(count, 2048 // costs.limits.block_size)
            + reports_per_second * router.report_seconds(round(results_per_report))
        )
        remark = "" if known_digests_rate >= TARGET_RATE else f"  (below {TARGET_RATE:,})"
        needed = request_rate * count
        print(
            f"{count:7}  {known_digests_rate:26,.0f}  {hashing_rate:12,.0f}  {needed:6,.0f}  "
            f"{load:26.1%}{remark}",
            flush=True,
        )
    print(
        "\nThe load includes hashing and 50 reports per second of each worker, but not HTTP or tokenization."
    )


def measure(options: argparse.Namespace) -> None:
    """Measure the durations of model steps and of routing. Writes the costs to a file and prints them."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        model = options.model or str(write_random_checkpoint(Path(folder), SHAPES[options.shape]))
        settings = {"model_path": model, "kv_cache_memory": options.kv_cache_memory, "max_batch_size": 32}
        if options.num_threads:
            settings["num_threads"] = options.num_threads
        config = PipelineConfig.from_flat(settings)
        step, limits = measure_steps(config)
    name = options.model or f"{options.shape} (random weights, {SHAPES[options.shape]['dtype']})"
    measured = {"model": name, "threads": str(options.num_threads or "all"), "machine": describe_machine()}
    measured["date"] = date.today().isoformat()
    costs = ClusterCosts(measured, limits, step, measure_router(WORKER_COUNTS))
    costs.write(options.output or COSTS_FILE)
    print(msgspec.json.format(msgspec.json.encode(costs)).decode())


def measure_router(worker_counts: Sequence[int]) -> RouterCosts:
    """Return the CPU seconds of the router: per decision with hashing, and per report of a worker."""
    features, seconds = [], []
    # A router with one worker makes no decision.
    for count in sorted({max(2, min(worker_counts)), 32, max(worker_counts)}):
        for length in (256, 2048):
            _, rate = measure_decisions(count, _NUM_PREFIXES, length, _NUM_DECISIONS)
            features.append([1.0, count, length // 32])
            seconds.append(1 / rate)
    weights = 1 / np.array(seconds)  # minimizes relative errors
    decision_coefficients = non_negative_least_squares(
        np.array(features) * weights[:, None], np.ones(len(features))
    )
    seconds_of_1_result, seconds_of_32_results = measure_report(1), measure_report(32)
    per_result = max(seconds_of_32_results - seconds_of_1_result, 0.0) / 31
    per_report = max(seconds_of_1_result - per_result, 0.0)
    return RouterCosts(*map(float, decision_coefficients), per_report=per_report, per_result=per_result)


def measure_report(num_results: int, num_reports: int = 2000) -> float:
    """Return the CPU seconds to decode and dispatch one report of a worker with ``num_results`` results."""
    request_ids = [f"{number:032x}" for number in range(num_results)]
    results = [TextResult(request_id, [7]) for request_id in request_ids]
    frame = report_encoder()(StepResults(WorkerStats(), results=results))
    generations = {request_id: Generation(request_id, lambda _: None) for request_id in request_ids}
    decode = report_decoder()

    def read_report() -> None:
        report = decode(frame)
        assert isinstance(report, StepResults)
        for result in report.results:
            generations[result.request_id].add(result)

    shortest_seconds = float("inf")
    for _ in range(3):
        begin = time.process_time()
        for _ in range(num_reports):
            read_report()
        shortest_seconds = min(shortest_seconds, (time.process_time() - begin) / num_reports)
        for generation in generations.values():
            generation._results.clear()
    return shortest_seconds


if __name__ == "__main__":
    main()
