"""Measure the router: decisions per second, and the throughput and hit rate of several routing policies.

    python benchmarks/router.py decisions               # decisions per second, with fake workers
    python benchmarks/router.py workers --model DIR     # 2 workers of 1 thread, and 1 worker of 2 threads
    python benchmarks/router.py prefixes --model DIR    # prefix hits and time to first token per policy
    python benchmarks/router.py ray --model DIR         # like prefixes: routers of Penstock and Ray Serve

``decisions`` measures the CPU time of `WorkerRouter.submit`, which chooses a worker, and of the bookkeeping
at the end of each request. The script prints two rates: without and with the computation of block digests.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from penstock.config import PipelineConfig
from penstock.engines import make_engine
from penstock.pipelines.core import RequestContext, SamplingParams, TextContext
from penstock.pipelines.core.cache_events import BlocksStored
from penstock.worker.messages import TextResult, WorkerInfo, WorkerStats
from penstock.worker.results import Generation
from penstock.worker.router import WorkerRouter
from penstock.worker.routing import LeastLoaded, RoutingPolicy, WorkerLoads, prompt_digests

WORKER_INFO = WorkerInfo(
    max_length=32768,
    max_batch_size=64,
    max_batch_input_tokens=8192,
    num_blocks=10_000,
    block_size=32,
    vocab_size=1000,
    prefix_limits=[],
)

_REPORT_INTERVAL = 2.0  # seconds between two metric reports of a Ray replica


@dataclass
class IdleWorker:
    """A fake worker that accepts requests and generates nothing."""

    info: WorkerInfo = WORKER_INFO
    state: str = "ready"
    stats: WorkerStats = field(default_factory=WorkerStats)
    listener: Any = None

    def watch_cache(self, listener: Any) -> None:
        """Store the listener of cache events."""
        self.listener = listener

    def submit(self, context: RequestContext) -> Generation:
        """Return a generation without results."""
        return Generation(context.request_id, lambda request_id: None)


class RandomRouting:
    """A routing policy that chooses a ready worker at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(
        self, context: RequestContext, digests: Sequence[bytes], loads: WorkerLoads, workers: int
    ) -> int:
        """Return the index of a ready worker. Bit n of ``workers`` is set if worker n is ready."""
        ready_workers = [number for number in range(len(loads.costs)) if workers >> number & 1]
        return self._random.choice(ready_workers)


def greedy_context(request_id: str, tokens: Sequence[int], num_new_tokens: int = 16) -> TextContext:
    """Return the context of a request with greedy sampling."""
    return TextContext(
        prompt="",
        max_length=len(tokens) + num_new_tokens,
        tokens=np.array(tokens, np.int64),
        ignore_eos=True,
        sampling_params=SamplingParams(temperature=0.0),
        request_id=request_id,
    )


# -- Decisions -------------------------------------------------------------------------------------------


def measure_decisions(
    num_workers: int, num_prefixes: int, prompt_length: int, num_requests: int
) -> tuple[float, float]:
    """Return the decisions per second without and with the computation of block digests.

    Args:
        num_workers: number of fake workers.
        num_prefixes: number of prefixes. Each prompt begins with a random one of these prefixes. For each
            prefix, a random eighth of the workers, at least one worker, has the prefix cached.
        prompt_length: number of prompt tokens. Three quarters of the prompt are the prefix.
        num_requests: number of requests.
    """
    rng = random.Random(0)
    workers = [IdleWorker() for _ in range(num_workers)]
    router = WorkerRouter(workers)  # type: ignore[arg-type]
    prefixes = [[rng.randrange(1000) for _ in range(prompt_length * 3 // 4)] for _ in range(num_prefixes)]
    for prefix in prefixes:
        for worker in rng.sample(workers, max(1, num_workers // 8)):
            worker.listener(
                0, [BlocksStored(prompt_digests(greedy_context("", prefix), WORKER_INFO), None, [])]
            )
    contexts = []
    for number in range(num_requests):
        suffix = [rng.randrange(1000) for _ in range(prompt_length - prompt_length * 3 // 4)]
        contexts.append(greedy_context(str(number), rng.choice(prefixes) + suffix))
    digests_by_request = {context.request_id: prompt_digests(context, WORKER_INFO) for context in contexts}
    active_generations: deque[Generation] = deque()

    def decisions_per_second() -> float:
        begin = time.process_time()
        for context in contexts:
            active_generations.append(router.submit(context))
            if len(active_generations) > 8 * num_workers:
                active_generations.popleft().add(TextResult("", [], END_OF_SEQUENCE))
        seconds = time.process_time() - begin
        while active_generations:
            active_generations.pop().add(TextResult("", [], END_OF_SEQUENCE))
        return num_requests / seconds

    with patch(
        "penstock.worker.router.prompt_digests", lambda context, info: digests_by_request[context.request_id]
    ):
        without_hashing = max(decisions_per_second() for _ in range(3))
    return without_hashing, max(decisions_per_second() for _ in range(3))


END_OF_SEQUENCE = msgspec.convert("end_of_sequence", type(TextResult("", []).status))


def report_decisions() -> None:
    """Print the decisions per second for several numbers of workers and prompt lengths."""
    print("workers  prompt  decisions/s, digests known  with hashing")
    for num_workers in (2, 8, 32, 100):
        for length in (256, 2048, 8192):
            without_hashing, with_hashing = measure_decisions(num_workers, 50, length, 2000)
            print(f"{num_workers:7}  {length:6}  {without_hashing:26,.0f}  {with_hashing:12,.0f}", flush=True)


# -- Real workers ----------------------------------------------------------------------------------------


@dataclass
class Measurement:
    """The figures of a run of requests."""

    seconds: float = 0.0
    num_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    """Seconds to the first token of each request."""
    round_medians: list[float] = field(default_factory=list)
    """Median of `first_token_seconds` in each round."""
    hit_rate: float = 0.0
    """Share of prompt tokens that were in the prefix cache."""
    _num_in_past_rounds: int = 0  # number of requests in the finished rounds

    def end_round(self) -> None:
        """Record the median of the requests since the end of the previous round."""
        self.round_medians.append(statistics.median(self.first_token_seconds[self._num_in_past_rounds :]))
        self._num_in_past_rounds = len(self.first_token_seconds)

    def __str__(self) -> str:
        ordered = sorted(self.first_token_seconds)
        p95 = ordered[int(0.95 * (len(ordered) - 1))]
        rounds = ", ".join(f"{median:.3f}" for median in self.round_medians)
        return (
            f"{self.num_tokens / self.seconds:7.1f} tokens/s, first token {statistics.median(ordered):.3f} s "
            f"(median; of each round {rounds}) {statistics.fmean(ordered):.3f} s (mean) {p95:.3f} s (p95), "
            f"hit rate {self.hit_rate:.2f}"
        )


async def run_requests(
    config: PipelineConfig,
    policy: Callable[[], RoutingPolicy] | None,
    rounds: Sequence[Sequence[TextContext]],
    concurrency: int,
) -> Measurement:
    """Start an engine and run rounds of requests, at most ``concurrency`` at once.

    ``policy`` None uses the engine's own router and policy.
    """
    engine = make_engine(config)
    if policy is not None:
        engine = WorkerRouter(engine.workers, policy())
    await engine.start()
    try:
        async for _ in engine.submit(greedy_context("warm-up", [1] * 40)):
            pass
        semaphore, result = asyncio.Semaphore(concurrency), Measurement()

        async def generate(context: TextContext) -> None:
            async with semaphore:
                begin, is_first = time.perf_counter(), True
                async for delta in engine.submit(context):
                    if is_first and delta.token_ids:
                        result.first_token_seconds.append(time.perf_counter() - begin)
                        is_first = False
                    result.num_tokens += len(delta.token_ids)

        for contexts in rounds:
            begin = time.perf_counter()
            await asyncio.gather(*(generate(context) for context in contexts))
            result.seconds += time.perf_counter() - begin
            result.end_round()
        stats = engine.stats
        result.hit_rate = stats.num_prefix_hit_tokens / max(stats.num_prefix_query_tokens, 1)
        return result
    finally:
        await engine.stop(0)


def mixed_contexts(num_requests: int, vocab_size: int) -> list[TextContext]:
    """Return requests of mixed lengths without shared prefixes."""
    rng = random.Random(1)
    return [
        greedy_context(
            str(number),
            [rng.randrange(3, vocab_size) for _ in range(rng.choice((16, 64, 128, 512)))],
            rng.choice((8, 32, 64)),
        )
        for number in range(num_requests)
    ]


def prefix_contexts(num_requests: int, vocab_size: int, seed: int = 2) -> list[TextContext]:
    """Return requests that begin with one of 8 prefixes of 768 tokens. The seed determines the prefixes."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, vocab_size) for _ in range(768)] for _ in range(8)]
    return [
        greedy_context(
            f"{seed}-{number}",
            rng.choice(prefixes) + [rng.randrange(3, vocab_size) for _ in range(32)],
            8,
        )
        for number in range(num_requests)
    ]


def make_config(model: str, **settings: Any) -> PipelineConfig:
    """Return the configuration of an engine for a model, with further ``settings``."""
    return PipelineConfig.from_flat({"model_path": model, "kv_cache_memory": "256MiB", **settings})


def report_workers(model: str, num_requests: int) -> None:
    """Measure one worker with two threads and two workers with one thread each, and print both."""
    contexts = mixed_contexts(num_requests, make_config(model).model.huggingface_config.vocabulary_size)
    for name, settings in {
        "1 worker of 2 threads": {"num_threads": 2},
        "2 workers of 1 thread": {"data_parallel_size": 2, "num_threads": 1},
    }.items():
        for concurrency in (1, 8):
            result = asyncio.run(run_requests(make_config(model, **settings), None, [contexts], concurrency))
            print(f"{name}, {concurrency} at once: {result}", flush=True)


def prefix_rounds(model: str, num_requests: int, num_rounds: int) -> list[list[TextContext]]:
    """Return rounds of ``num_requests`` requests with shared prefixes. Each round has new prefixes."""
    vocab_size = make_config(model).model.huggingface_config.vocabulary_size
    return [prefix_contexts(num_requests, vocab_size, 2 + number) for number in range(num_rounds)]


def report_prefixes(model: str, num_requests: int, num_rounds: int, kv_cache_memory: str) -> None:
    """Measure prefix-aware, least loaded and random routing over two workers, and print each."""
    config = make_config(model, data_parallel_size=2, num_threads=1, kv_cache_memory=kv_cache_memory)
    for name, policy in {
        "prefix-aware": None,
        "least loaded": LeastLoaded,
        "random": lambda: RandomRouting(0),
    }.items():
        rounds = prefix_rounds(model, num_requests, num_rounds)
        print(f"{name}: {asyncio.run(run_requests(config, policy, rounds, 4))}", flush=True)


async def run_streams(url: str, rounds: Sequence[Sequence[TextContext]], concurrency: int) -> Measurement:
    """Run rounds of streamed requests on a server, at most ``concurrency`` at once."""
    import httpx

    semaphore, result = asyncio.Semaphore(concurrency), Measurement()

    async with httpx.AsyncClient(base_url=url, timeout=None) as client:

        async def generate(context: TextContext) -> None:
            count = context.max_length - context.current_length
            body = {
                "prompt": context.all_tokens.tolist(),
                "max_tokens": count,
                "ignore_eos": True,
                "stream": True,
            }
            async with semaphore:
                begin, is_first = time.perf_counter(), True
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        if is_first and line.startswith("data: {"):
                            result.first_token_seconds.append(time.perf_counter() - begin)
                            is_first = False
            result.num_tokens += count

        async def prefix_cache_counters() -> list[float]:
            """Return the hits and queries of the prefix cache in tokens."""
            text = (await client.get("/metrics")).text
            return [
                float(re.findall(rf"^penstock_prefix_cache_{name}_total\S* (\S+)$", text, re.M)[0])
                for name in ("hits", "queries")
            ]

        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.1)
        await generate(greedy_context("warm-up", [1] * 40))
        await asyncio.sleep(2 * _REPORT_INTERVAL)
        counters_before = await prefix_cache_counters()
        for contexts in rounds:
            begin = time.perf_counter()
            await asyncio.gather(*(generate(context) for context in contexts))
            result.seconds += time.perf_counter() - begin
            result.end_round()
        await asyncio.sleep(2 * _REPORT_INTERVAL)
        hits, queries = (
            now - then for now, then in zip(await prefix_cache_counters(), counters_before, strict=True)
        )
        result.hit_rate = hits / max(queries, 1)
    return result


def report_ray(
    model: str, num_requests: int, num_rounds: int, kv_cache_memory: str, measure_ray_first: bool
) -> None:
    """Measure Penstock's router and Ray Serve's default router over two replicas, and print both."""
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from penstock.ray import build_app
    from penstock.ray.deployment import ROUTER_CLASS

    rounds = prefix_rounds(model, num_requests, num_rounds)
    settings = {"model_path": model, "ray_min_replicas": 2, "ray_cpus": 1, "kv_cache_memory": kv_cache_memory}
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    routers = {
        "prefix-aware": ROUTER_CLASS,
        "Ray Serve's default": RequestRouterConfig().request_router_class,
    }
    for name in sorted(routers, reverse=not measure_ray_first):
        router = routers[name]
        with patch("penstock.ray.online.ROUTER_CLASS", router):
            serve.run(build_app(settings), name="penstock", route_prefix="/")
        print(f"{name}: {asyncio.run(run_streams(f'http://127.0.0.1:{port}', rounds, 4))}", flush=True)
        serve.delete("penstock")
    ray.shutdown()


def main() -> None:
    """Run the measurement that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("decisions", "workers", "prefixes", "ray"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=64, help="number of requests per round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--reverse", action="store_true", help="for ray: measure Ray Serve's router first")
    parser.add_argument("--kv-cache-memory", default="256MiB")
    options = parser.parse_args()
    if options.what == "decisions":
        report_decisions()
    elif options.what == "workers":
        report_workers(options.model, options.requests)
    elif options.what == "ray":
        report_ray(options.model, options.requests, options.rounds, options.kv_cache_memory, options.reverse)
    else:
        report_prefixes(options.model, options.requests, options.rounds, options.kv_cache_memory)


if __name__ == "__main__":
    main()
