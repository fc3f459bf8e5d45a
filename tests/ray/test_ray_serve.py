"""`penstock serve --ray` on a local Ray cluster: answers, lost replicas, errors, and draining."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.ray_programs import (
    NUM_TOKENS,
    PROMPTS,
    RayProgram,
    completion_body,
    free_port,
    is_ready,
    post,
    ray_program,
    wait_until,
)

from penstock import LLM, SamplingParams

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def expected_texts() -> list[str]:
    """Return the texts that a single process generates."""
    with LLM("demo", kv_cache_memory="64MiB") as llm:
        params = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        return [output.text for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[RayProgram, int]]:
    port = free_port()
    flags = [
        "--ray",
        "--ray-address",
        "local",
        "--ray-min-replicas",
        "2",
        "--ray-cpus",
        "1",
        "--port",
        str(port),
    ]
    flags += ["--kv-cache-memory", "64MiB", "--shutdown-grace", "60"]
    with ray_program(["-m", "penstock", "serve", "demo", *flags], tmp_path) as program:
        wait_until(lambda: is_ready(port) or program.process.poll() is not None, 120)
        wait_until(lambda: "penstock: serving" in program.output, 60)
        yield program, port


def test_requests_survive_lost_replicas_and_streams_survive_the_shutdown(
    server: tuple[RayProgram, int], expected_texts: list[str]
) -> None:
    program, port = server
    # 1. A replica is killed: the texts equal those of a single process.
    replicas = program.pids("ray::ServeReplica:penstock:engine")
    assert len(replicas) == 2
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(post, port, completion_body(prompt)) for prompt in PROMPTS]
        wait_until(lambda: sum(answer.done() for answer in answers) >= 1)
        assert not all(answer.done() for answer in answers)
        os.kill(replicas[0], signal.SIGKILL)
        texts = [answer.result(100)["choices"][0]["text"] for answer in answers]
    assert texts == expected_texts
    wait_until(lambda: "continues on another replica" in program.output, 10)
    # 2. The worker process of a replica is killed: the texts are equal again.
    wait_until(lambda: len(program.pids("ray::ServeReplica:penstock:engine")) == 2)
    workers = program.pids("penstock.worker.main")
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(post, port, completion_body(prompt)) for prompt in PROMPTS]
        wait_until(lambda: sum(answer.done() for answer in answers) >= 1)
        os.kill(workers[0], signal.SIGKILL)
        texts = [answer.result(100)["choices"][0]["text"] for answer in answers]
    assert texts == expected_texts
    # 3. Invalid and unsupported requests are refused.
    with pytest.raises(urllib.error.HTTPError) as refused_error:
        post(port, completion_body("x", max_tokens=-1))
    assert refused_error.value.code == 400
    refused_error.value.close()
    with pytest.raises(urllib.error.HTTPError) as unsupported_error:
        post(port, {}, "/reload")
    assert unsupported_error.value.code == 400
    with unsupported_error.value as answer:
        assert "deploy the application" in json.load(answer)["error"]["message"]
    # 4. A stream that runs while the server stops is complete.
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(completion_body(PROMPTS[3], stream=True)).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=100) as response:
        first_line = response.readline()
        threading.Thread(target=program.process.send_signal, args=(signal.SIGTERM,)).start()
        lines = [first_line, *response]
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected_texts[3]
    assert lines[-2] == b"data: [DONE]\n"
    assert program.wait() == 0
    wait_until(lambda: not program.pids("penstock.worker.main"), 20)
