"""`penstock serve --ray` routes prompts with a common prefix to one of two replicas."""

from __future__ import annotations

import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.ray_programs import completion, free_port, is_ready, post, ray_program, until

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
    pytest.mark.timeout(300),
]

GROUPS, ROUNDS = 8, 4
STORY = "Once upon a time, far away, there was a small house beside a river. "


def make_prompt(group: int, turn: int) -> str:
    return f"Story {group} of the old woman. " + STORY * 8 + f"Part {turn}."


def read_hits_and_queries(port: int) -> tuple[int, int]:
    """Return (prompt tokens found in the prefix cache, prompt tokens), summed over replicas."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    matches = [
        re.search(rf"^penstock_prefix_cache_{name}_total\S* ([\d.e+]+)$", text, re.M)
        for name in ("hits", "queries")
    ]
    hits, queries = (int(float(match[1])) for match in matches if match is not None)
    return hits, queries


def test_a_prefix_is_computed_by_only_one_replica(tmp_path: Path) -> None:
    port = free_port()
    flags = ["--ray", "--ray-address", "local", "--ray-min-replicas", "2", "--ray-cpus", "1"]
    flags += ["--port", str(port), "--kv-cache-memory", "64MiB"]
    with ray_program(["-m", "penstock", "serve", "demo", *flags], tmp_path) as program:
        until(lambda: is_ready(port) or program.process.poll() is not None, 120)
        until(lambda: "penstock: serving" in program.output, 60)
        time.sleep(5)  # until both replicas have reported the requests of their warm-up
        before = read_hits_and_queries(port)
        with ThreadPoolExecutor(4) as pool:
            for turn in range(ROUNDS):  # four requests at a time, so that both replicas have requests
                futures = [
                    pool.submit(post, port, completion(make_prompt(group, turn), max_tokens=20))
                    for group in range(GROUPS)
                ]
                answers = [future.result(100) for future in futures]
        length = answers[0]["usage"]["prompt_tokens"]
        until(lambda: read_hits_and_queries(port)[1] - before[1] >= 0.98 * GROUPS * ROUNDS * length, 20)
        hits = read_hits_and_queries(port)[0] - before[0]
        # Each round after the first finds the prompt in the cache, except for its last blocks of 32 tokens.
        assert hits >= (ROUNDS - 1) * GROUPS * (length - 2 * 32)
