"""A server on Ray Serve: a node is removed, another node is added, and a second replica starts under load."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.ray_programs import PROMPTS, completion_body, free_port, is_ready, post, ray_program, wait_until

from penstock import LLM, SamplingParams

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
    pytest.mark.timeout(300),
]

NODES = """
import time
from pathlib import Path

import ray
from ray import serve
from ray.cluster_utils import Cluster
from penstock.ray import build_app


def nodes_of(name):
    return [
        actor["Address"]["NodeID"] for actor in ray._private.state.actors().values()
        if actor["ActorClassName"] == "ServeReplica:default:" + name and actor["State"] == "ALIVE"
    ]


cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 0}})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
cluster.connect()
serve.start(proxy_location="HeadOnly", http_options={{"host": "127.0.0.1", "port": {port}}})
settings = {{"model_path": "demo", "ray_min_replicas": 2, "ray_cpus": 1, "kv_cache_memory": "64MiB"}}
serve.run(build_app(settings))
print("all is deployed", flush=True)
while not Path("remove").exists():
    time.sleep(0.05)
(ingress,) = nodes_of("ingress")
node = next(node for node in nodes if node.node_id != ingress)
assert node.node_id in nodes_of("engine")
cluster.remove_node(node, allow_graceful=False)
print("a node is removed", flush=True)
while not Path("add").exists():
    time.sleep(0.05)
cluster.add_node(num_cpus=1)
while len(nodes_of("engine")) < 2:
    time.sleep(0.1)
print("two replicas again", flush=True)
while not Path("end").exists():
    time.sleep(0.05)
serve.shutdown()
"""


def test_requests_continue_after_a_node_is_removed_and_another_is_added(tmp_path: Path) -> None:
    with LLM("demo", kv_cache_memory="64MiB") as llm:
        params = SamplingParams(max_new_tokens=900, temperature=0, ignore_eos=True)
        expected = [output.text for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    port = free_port()
    with ray_program(["-c", NODES.format(port=port)], tmp_path) as program:
        wait_until(lambda: "all is deployed" in program.output or program.process.poll() is not None, 150)
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = [pool.submit(post, port, completion_body(prompt)) for prompt in PROMPTS]
            wait_until(lambda: sum(answer.done() for answer in answers) >= 1)
            (tmp_path / "remove").touch()
            texts = [answer.result(100)["choices"][0]["text"] for answer in answers]
        assert texts == expected
        wait_until(lambda: "a node is removed" in program.output)
        (tmp_path / "add").touch()
        wait_until(lambda: "two replicas again" in program.output, 100)
        assert post(port, completion_body(PROMPTS[0]))["choices"][0]["text"] == expected[0]
        (tmp_path / "end").touch()
        assert program.wait() == 0


def test_a_second_replica_starts_under_load(tmp_path: Path) -> None:
    port = free_port()
    flags = ["--ray", "--ray-address", "local", "--ray-max-replicas", "2", "--ray-target-requests", "2"]
    flags += ["--ray-cpus", "1", "--port", str(port), "--kv-cache-memory", "64MiB"]
    with ray_program(["-m", "penstock", "serve", "demo", *flags], tmp_path) as program:
        wait_until(lambda: is_ready(port) or program.process.poll() is not None, 120)

        def find_replicas() -> list[int]:
            return program.pids("ray::ServeReplica:penstock:engine")

        assert len(find_replicas()) == 1
        is_finished = False

        def send_requests(prompt: str) -> None:
            while not is_finished:
                post(port, completion_body(prompt))

        with ThreadPoolExecutor(12) as pool:
            requests = [pool.submit(send_requests, prompt) for prompt in PROMPTS[:12]]
            try:
                wait_until(lambda: len(find_replicas()) == 2, 120)
            finally:
                is_finished = True
            for request in requests:
                request.result(100)
