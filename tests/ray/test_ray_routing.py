"""`penstock serve --ray` keeps prompts with a common prefix, and sessions, on one of two replicas."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import httpx
import pytest
from support.ray_programs import completion_body, free_port, is_ready, post, ray_program, wait_until
from support.sessions import stays_with_its_worker

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
    pytest.mark.timeout(300),
]

NUM_GROUPS, NUM_ROUNDS = 8, 4
STORY = "Once upon a time, far away, there was a small house beside a river. "


def make_prompt(group: int, turn: int) -> str:
    return f"Story {group} of the old woman. " + STORY * 8 + f"Part {turn}."


def read_hits_and_queries(server_port: int) -> tuple[int, int]:
    """Return two sums over the replicas: prompt tokens found in a prefix cache, and all prompt tokens."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server_port}/metrics", timeout=10) as response:
        text = response.read().decode()
    matches = [
        re.search(rf"^penstock_prefix_cache_{name}_total\S* ([\d.e+]+)$", text, re.M)
        for name in ("hits", "queries")
    ]
    num_hits, num_queries = (int(float(match[1])) for match in matches if match is not None)
    return num_hits, num_queries


@pytest.fixture(scope="module")
def server_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Return the port of a server with two replicas, after their reports include the warm-up requests."""
    server_port, folder = free_port(), tmp_path_factory.mktemp("server")
    flags = ["--ray", "--ray-address", "local", "--ray-min-replicas", "2", "--ray-cpus", "1"]
    flags += ["--port", str(server_port), "--kv-cache-memory", "64MiB"]
    with ray_program(["-m", "penstock", "serve", "demo", *flags], folder) as program:
        wait_until(lambda: is_ready(server_port) or program.process.poll() is not None, 120)
        wait_until(lambda: "penstock: serving" in program.output, 60)
        time.sleep(5)
        yield server_port


def test_a_prefix_is_computed_by_one_replica(server_port: int) -> None:
    counts_before = read_hits_and_queries(server_port)
    with ThreadPoolExecutor(4) as pool:
        for turn in range(NUM_ROUNDS):  # four requests at a time, so that both replicas have requests
            requests = [
                pool.submit(post, server_port, completion_body(make_prompt(group, turn), max_tokens=20))
                for group in range(NUM_GROUPS)
            ]
            answers = [request.result(100) for request in requests]
    length = answers[0]["usage"]["prompt_tokens"]
    wait_until(
        lambda: (
            read_hits_and_queries(server_port)[1] - counts_before[1]
            >= 0.98 * NUM_GROUPS * NUM_ROUNDS * length
        ),
        20,
    )
    num_hits = read_hits_and_queries(server_port)[0] - counts_before[0]
    # In every round but the first, at most the last two blocks (32 tokens each) of a prompt are not cached.
    assert num_hits >= (NUM_ROUNDS - 1) * NUM_GROUPS * (length - 2 * 32)


async def test_a_session_stays_with_its_replica(server_port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server_port}", timeout=60) as client:
        assert not await stays_with_its_worker(client, "none")
        assert await stays_with_its_worker(client, "header", {"X-Session-ID": "a"})
        assert await stays_with_its_worker(client, "user", user="b")
