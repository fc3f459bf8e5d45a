"""Measure the time to first token of short requests, with and without another client's many choices.

    python benchmarks/fairness.py
    python benchmarks/fairness.py --model MODEL --choices 32

Starts a server with the model. The first client sends requests with ``--choices`` choices one after another.
The second client streams short requests with a pause of 0.03 s between them. Prints the second client's time
to first token (median and p90) with and without the first client, the ratio of the medians, and the first
client's tokens per second.
"""

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
"""Seconds between the end of a short request and the start of the client's next request."""


@contextmanager
def server(model: str, max_batch_size: int) -> Iterator[str]:
    """Start a server and yield its address. Stops the server at the end."""
    command = [sys.executable, "-m", "penstock", "serve", "--model", model, "--port", "0"]
    command += ["--max-batch-size", str(max_batch_size)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if address_match := re.search(r"http://\S+?:\d+", line):
                break
        else:
            raise SystemExit("the server ended before it printed its address")
        discard_output = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield address_match.group()
        discard_output.terminate()
    finally:
        process.terminate()
        process.wait()


async def time_to_first_token(client: httpx.AsyncClient, number: int) -> float:
    """Send a short request and return the seconds to its first token. ``number`` changes the prompt."""
    body = {"prompt": f"story {number} of the sea", "max_tokens": 4, "stream": True, "ignore_eos": True}
    start = time.perf_counter()
    first_token_seconds = None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if first_token_seconds is None and line.startswith("data:"):
                first_token_seconds = time.perf_counter() - start
    assert first_token_seconds is not None
    return first_token_seconds


async def times_to_first_token(client: httpx.AsyncClient, first_number: int, count: int) -> list[float]:
    """Send ``count`` short requests one after another and return the seconds to the first token of each."""
    seconds = []
    for number in range(first_number, first_number + count):
        seconds.append(await time_to_first_token(client, number))
        await asyncio.sleep(_PAUSE)
    return seconds


async def send_many_choices(client: httpx.AsyncClient, num_choices: int, token_counts: list[int]) -> None:
    """Send requests with many choices one after another, until the task is cancelled.

    Appends the number of generated tokens of each request to ``token_counts``.
    """
    body = {"prompt": "Once upon a time", "n": num_choices, "max_tokens": 300, "ignore_eos": True}
    while True:
        response = await client.post("/v1/completions", json=body)
        response.raise_for_status()
        token_counts.append(response.json()["usage"]["completion_tokens"])


async def measure(url: str, num_choices: int, num_requests: int) -> None:
    """Measure the second client without and with requests of the first client, and print both times."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=600.0) as first_client,
        httpx.AsyncClient(base_url=url, timeout=600.0) as second_client,
    ):
        while (await second_client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.1)
        await times_to_first_token(second_client, 0, 5)
        times_alone = await times_to_first_token(second_client, 100, num_requests)
        counts: list[int] = []
        task = asyncio.create_task(send_many_choices(first_client, num_choices, counts))
        start = time.perf_counter()
        await asyncio.sleep(1.5)
        times_with_choices = await times_to_first_token(second_client, 10_000, num_requests)
        while not counts and not task.done():
            await asyncio.sleep(0.1)
        speed = sum(counts) / (time.perf_counter() - start)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for name, seconds in (("alone", times_alone), (f"with {num_choices} choices", times_with_choices)):
        p90 = statistics.quantiles(seconds, n=10)[-1]
        print(f"{name}: median {statistics.median(seconds) * 1e3:.1f} ms, p90 {p90 * 1e3:.1f} ms")
    ratio = statistics.median(times_with_choices) / statistics.median(times_alone)
    print(f"ratio of the medians {ratio:.2f}; the first client got {speed:.0f} tokens/s")


def main() -> None:
    """Start a server and measure it."""
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
