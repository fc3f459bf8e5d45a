"""Time to the first token of a short request, on an idle server and while another client holds many slots.

    python benchmarks/fairness.py
    python benchmarks/fairness.py --model MODEL --choices 32

Starts a server with the model. The first client sends requests with ``--choices`` choices, one after the
other; its tokens per second are printed too. The second client streams short requests with a pause between
them."""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

_PAUSE = 0.03
"""Seconds between two short requests."""


@contextmanager
def server(model: str, max_batch_size: int) -> Iterator[str]:
    """Start a server and yield its address. Ends the server."""
    command = [sys.executable, "-m", "penstock", "serve", "--model", model, "--port", "0"]
    command += ["--max-batch-size", str(max_batch_size)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"http://\S+?:\d+", line):
                break
        else:
            raise SystemExit("the server ended")
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield found.group()
        drain.terminate()
    finally:
        process.terminate()
        process.wait()


async def first_token(client: httpx.AsyncClient, number: int) -> float:
    """Return the seconds to the first token of a short request."""
    body = {"prompt": f"story {number} of the sea", "max_tokens": 4, "stream": True, "ignore_eos": True}
    start = time.perf_counter()
    first = None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if first is None and line.startswith("data:"):
                first = time.perf_counter() - start
    assert first is not None
    return first


async def first_tokens(client: httpx.AsyncClient, begin: int, count: int) -> list[float]:
    """Return the seconds to the first token of several requests, one after the other."""
    seconds = []
    for number in range(begin, begin + count):
        seconds.append(await first_token(client, number))
        await asyncio.sleep(_PAUSE)
    return seconds


async def send_many_choices(client: httpx.AsyncClient, choices: int, counts: list[int]) -> None:
    """Send requests with many choices until it is cancelled, and append the number of tokens of each."""
    body = {"prompt": "Once upon a time", "n": choices, "max_tokens": 300, "ignore_eos": True}
    while True:
        response = await client.post("/v1/completions", json=body)
        response.raise_for_status()
        counts.append(response.json()["usage"]["completion_tokens"])


async def measure(url: str, choices: int, requests: int) -> None:
    """Measure and print."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=600.0) as one,
        httpx.AsyncClient(base_url=url, timeout=600.0) as other,
    ):
        while (await one.get("/ready")).status_code != 200:
            await asyncio.sleep(0.1)
        await first_tokens(one, 0, 5)
        idle = await first_tokens(one, 100, requests)
        counts: list[int] = []
        task = asyncio.create_task(send_many_choices(other, choices, counts))
        start = time.perf_counter()
        await asyncio.sleep(1.5)
        beside = await first_tokens(one, 10_000, requests)
        while not counts and not task.done():
            await asyncio.sleep(0.1)
        speed = sum(counts) / (time.perf_counter() - start)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for name, seconds in (("idle", idle), (f"beside {choices} choices", beside)):
        high = statistics.quantiles(seconds, n=10)[-1]
        print(f"{name}: median {statistics.median(seconds) * 1e3:.1f} ms, p90 {high * 1e3:.1f} ms")
    ratio = statistics.median(beside) / statistics.median(idle)
    print(f"ratio of the medians {ratio:.2f}; the first client got {speed:.0f} tokens/s")


def main() -> None:
    """Start a server and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--choices", type=int, default=128)
    parser.add_argument("--requests", type=int, default=100)
    options = parser.parse_args()
    with server(options.model, options.choices + 32) as url:
        asyncio.run(measure(url, options.choices, options.requests))


if __name__ == "__main__":
    main()
