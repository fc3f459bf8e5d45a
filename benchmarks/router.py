"""Routing decisions per second, and prefix-aware against random routing.

    python benchmarks/router.py decisions                     # decisions per second, without workers
    python benchmarks/router.py workers --model DIR           # 2 workers of 1 thread against 1 of 2 threads
    python benchmarks/router.py prefixes --model DIR          # hit rate and time to first token of policies
    python benchmarks/router.py ray --model DIR               # the same for 2 replicas of Ray Serve

``decisions`` measures `WorkerRouter.submit` with fake workers: the choice, and the bookkeeping at the end of
each request. The block digests are computed before. Its times are processor times of one thread.
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

INFO = WorkerInfo(
    max_length=32768,
    max_batch_size=64,
    max_batch_input_tokens=8192,
    num_blocks=10_000,
    block_size=32,
    vocab_size=1000,
    prefix_limits=[],
)

_REPORT_SECONDS = 2.0  # between two reports of replicas on Ray


@dataclass
class IdleWorker:
    """A worker that accepts requests and does nothing."""

    info: WorkerInfo = INFO
    state: str = "ready"
    stats: WorkerStats = field(default_factory=WorkerStats)
    listener: Any = None

    def watch_cache(self, listener: Any) -> None:
        self.listener = listener

    def submit(self, context: RequestContext) -> Generation:
        return Generation(context.request_id, lambda request_id: None)


class RandomWorker:
    """Chooses workers at random."""

    def __init__(self, seed: int) -> None:
        self._draws = random.Random(seed)

    def choose(
        self, context: RequestContext, digests: Sequence[bytes], loads: WorkerLoads, workers: int
    ) -> int:
        """Return a ready worker."""
        ready = [number for number in range(len(loads.costs)) if workers >> number & 1]
        return self._draws.choice(ready)


def context_of(name: str, tokens: Sequence[int], new_tokens: int = 16) -> TextContext:
    """Return a greedy request."""
    return TextContext(
        prompt="",
        max_length=len(tokens) + new_tokens,
        tokens=np.array(tokens, np.int64),
        ignore_eos=True,
        sampling_params=SamplingParams(temperature=0.0),
        request_id=name,
    )


# -- Decisions -------------------------------------------------------------------------------------------


def measure_decisions(num_workers: int, num_prefixes: int, length: int, count: int) -> tuple[float, float]:
    """Return decisions per second, with the digests known and with the digests computed."""
    draws = random.Random(0)
    workers = [IdleWorker() for _ in range(num_workers)]
    router = WorkerRouter(workers)  # type: ignore[arg-type]
    prefixes = [[draws.randrange(1000) for _ in range(length * 3 // 4)] for _ in range(num_prefixes)]
    for prefix in prefixes:
        for worker in draws.sample(workers, max(1, num_workers // 8)):
            worker.listener(0, [BlocksStored(prompt_digests(context_of("", prefix), INFO), None, [])])
    contexts = []
    for number in range(count):
        own = [draws.randrange(1000) for _ in range(length - length * 3 // 4)]
        contexts.append(context_of(str(number), draws.choice(prefixes) + own))
    known = {context.request_id: prompt_digests(context, INFO) for context in contexts}
    running: deque[Generation] = deque()

    def run() -> float:
        begin = time.process_time()
        for context in contexts:
            running.append(router.submit(context))
            if len(running) > 8 * num_workers:
                running.popleft().add(TextResult("", [], DONE))
        seconds = time.process_time() - begin
        while running:
            running.pop().add(TextResult("", [], DONE))
        return count / seconds

    with patch("penstock.worker.router.prompt_digests", lambda context, info: known[context.request_id]):
        given = max(run() for _ in range(3))
    return given, max(run() for _ in range(3))


DONE = msgspec.convert("end_of_sequence", type(TextResult("", []).status))


def report_decisions() -> None:
    """Print decisions per second for several sizes."""
    print("workers  prompt  decisions/s, digests known  with hashing")
    for num_workers in (2, 8, 32, 100):
        for length in (256, 2048, 8192):
            given, whole = measure_decisions(num_workers, 50, length, 2000)
            print(f"{num_workers:7}  {length:6}  {given:26,.0f}  {whole:12,.0f}", flush=True)


# -- Real workers ----------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run of requests measured."""

    seconds: float = 0.0
    num_tokens: int = 0
    first_token: list[float] = field(default_factory=list)
    round_medians: list[float] = field(default_factory=list)
    """Median first token of each round."""
    hit_rate: float = 0.0
    _num_in_rounds: int = 0  # requests of the rounds that have ended

    def end_round(self) -> None:
        """Record the median of the requests since the last round."""
        self.round_medians.append(statistics.median(self.first_token[self._num_in_rounds :]))
        self._num_in_rounds = len(self.first_token)

    def __str__(self) -> str:
        ordered = sorted(self.first_token)
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
) -> Run:
    """Run rounds of requests through an engine, at most ``concurrency`` at once."""
    engine = make_engine(config)
    if policy is not None:
        engine = WorkerRouter(engine.workers, policy())
    await engine.start()
    try:
        async for _ in engine.submit(context_of("warm-up", [1] * 40)):
            pass
        slots, run = asyncio.Semaphore(concurrency), Run()

        async def ask(context: TextContext) -> None:
            async with slots:
                begin, is_first = time.perf_counter(), True
                async for delta in engine.submit(context):
                    if is_first and delta.token_ids:
                        run.first_token.append(time.perf_counter() - begin)
                        is_first = False
                    run.num_tokens += len(delta.token_ids)

        for contexts in rounds:
            begin = time.perf_counter()
            await asyncio.gather(*(ask(context) for context in contexts))
            run.seconds += time.perf_counter() - begin
            run.end_round()
        stats = engine.stats
        run.hit_rate = stats.num_prefix_hit_tokens / max(stats.num_prefix_query_tokens, 1)
        return run
    finally:
        await engine.stop(0)


def mixed_contexts(count: int, vocabulary: int) -> list[TextContext]:
    """Return requests of mixed lengths without common prefixes."""
    draws = random.Random(1)
    return [
        context_of(
            str(number),
            [draws.randrange(3, vocabulary) for _ in range(draws.choice((16, 64, 128, 512)))],
            draws.choice((8, 32, 64)),
        )
        for number in range(count)
    ]


def shared_contexts(count: int, vocabulary: int, seed: int = 2) -> list[TextContext]:
    """Return requests with one of several long prefixes; another seed has other prefixes."""
    draws = random.Random(seed)
    prefixes = [[draws.randrange(3, vocabulary) for _ in range(768)] for _ in range(8)]
    return [
        context_of(
            f"{seed}-{number}",
            draws.choice(prefixes) + [draws.randrange(3, vocabulary) for _ in range(32)],
            8,
        )
        for number in range(count)
    ]


def config_of(model: str, **flat: Any) -> PipelineConfig:
    """Return the configuration of a measurement."""
    return PipelineConfig.from_flat({"model_path": model, "kv_cache_memory": "256MiB", **flat})


def report_workers(model: str, count: int) -> None:
    """Print one worker of two threads and two workers of one thread."""
    contexts = mixed_contexts(count, config_of(model).model.huggingface_config.vocabulary_size)
    for name, flat in {
        "1 worker of 2 threads": {"num_threads": 2},
        "2 workers of 1 thread": {"data_parallel_size": 2, "num_threads": 1},
    }.items():
        for concurrency in (1, 8):
            run = asyncio.run(run_requests(config_of(model, **flat), None, [contexts], concurrency))
            print(f"{name}, {concurrency} at once: {run}", flush=True)


def shared_rounds(model: str, count: int, num_rounds: int) -> list[list[TextContext]]:
    """Return rounds of requests; the prefixes of each round are new."""
    vocabulary = config_of(model).model.huggingface_config.vocabulary_size
    return [shared_contexts(count, vocabulary, 2 + number) for number in range(num_rounds)]


def report_prefixes(model: str, count: int, num_rounds: int, memory: str) -> None:
    """Print prefix-aware, least loaded and random routing over two workers."""
    config = config_of(model, data_parallel_size=2, num_threads=1, kv_cache_memory=memory)
    for name, policy in {
        "prefix-aware": None,
        "least loaded": LeastLoaded,
        "random": lambda: RandomWorker(0),
    }.items():
        rounds = shared_rounds(model, count, num_rounds)
        print(f"{name}: {asyncio.run(run_requests(config, policy, rounds, 4))}", flush=True)


async def run_streams(url: str, rounds: Sequence[Sequence[TextContext]], concurrency: int) -> Run:
    """Run rounds of requests through a server, at most ``concurrency`` at once."""
    import httpx

    slots, run = asyncio.Semaphore(concurrency), Run()

    async with httpx.AsyncClient(base_url=url, timeout=None) as client:

        async def ask(context: TextContext) -> None:
            count = context.max_length - context.current_length
            body = {
                "prompt": context.all_tokens.tolist(),
                "max_tokens": count,
                "ignore_eos": True,
                "stream": True,
            }
            async with slots:
                begin, is_first = time.perf_counter(), True
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        if is_first and line.startswith("data: {"):
                            run.first_token.append(time.perf_counter() - begin)
                            is_first = False
            run.num_tokens += count

        async def counters() -> list[float]:
            text = (await client.get("/metrics")).text
            return [
                float(re.findall(rf"^penstock_prefix_cache_{name}_total\S* (\S+)$", text, re.M)[0])
                for name in ("hits", "queries")
            ]

        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.1)
        await ask(context_of("warm-up", [1] * 40))
        await asyncio.sleep(2 * _REPORT_SECONDS)
        before = await counters()
        for contexts in rounds:
            begin = time.perf_counter()
            await asyncio.gather(*(ask(context) for context in contexts))
            run.seconds += time.perf_counter() - begin
            run.end_round()
        await asyncio.sleep(2 * _REPORT_SECONDS)
        hits, queries = (now - then for now, then in zip(await counters(), before, strict=True))
        run.hit_rate = hits / max(queries, 1)
    return run


def report_ray(model: str, count: int, num_rounds: int, memory: str, is_reversed: bool) -> None:
    """Print the router of `penstock serve --ray` and Ray Serve's default one, over two replicas."""
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from penstock.ray import build_app
    from penstock.ray.deployment import ROUTER

    rounds = shared_rounds(model, count, num_rounds)
    settings = {"model_path": model, "ray_min_replicas": 2, "ray_cpus": 1, "kv_cache_memory": memory}
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    routers = {
        "prefix-aware": ROUTER,
        "Ray Serve's default": RequestRouterConfig().request_router_class,
    }
    for name in sorted(routers, reverse=not is_reversed):
        router = routers[name]
        with patch("penstock.ray.online.ROUTER", router):
            serve.run(build_app(settings), name="penstock", route_prefix="/")
        print(f"{name}: {asyncio.run(run_streams(f'http://127.0.0.1:{port}', rounds, 4))}", flush=True)
        serve.delete("penstock")
    ray.shutdown()


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("decisions", "workers", "prefixes", "ray"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=64, help="of each round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--reverse", action="store_true", help="for ray: measure Ray Serve's router first")
    parser.add_argument("--kv-cache-memory", default="256MiB")
    given = parser.parse_args()
    if given.what == "decisions":
        report_decisions()
    elif given.what == "workers":
        report_workers(given.model, given.requests)
    elif given.what == "ray":
        report_ray(given.model, given.requests, given.rounds, given.kv_cache_memory, given.reverse)
    else:
        report_prefixes(given.model, given.requests, given.rounds, given.kv_cache_memory)


if __name__ == "__main__":
    main()
