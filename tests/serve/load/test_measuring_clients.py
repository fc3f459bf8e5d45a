"""Common load generators: the requests that they send, and the fields of answers that they need.

The requests follow their documentation. The tests read answers as strictly as these tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.server_process import ServerProcess

CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]}]}
BARE_CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}]}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
OFTEN = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PROMPT = {"prompt": "Once upon a time"}

SENT = {
    "vllm openai-chat": ("chat", CHAT | USAGE | {"temperature": 0.0, "max_completion_tokens": 24}),
    "vllm openai-chat, ignore_eos": (
        "chat",
        CHAT
        | USAGE
        | {"temperature": 0.0, "max_completion_tokens": 24, "ignore_eos": True, "min_tokens": 24},
    ),
    "vllm openai": (
        "text",
        PROMPT | USAGE | {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 24, "logprobs": None},
    ),
    "vllm openai, tokens": ("text", {"prompt": [5, 6, 7] * 10, "max_tokens": 24, "ignore_eos": True} | USAGE),
    "sglang": (
        "text",
        PROMPT | USAGE | {"temperature": 0.0, "best_of": 1, "max_tokens": 24, "ignore_eos": True},
    ),
    "sglang chat": ("chat", BARE_CHAT | USAGE | {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}),
    "guidellm text": (
        "text",
        PROMPT | OFTEN | {"max_tokens": 24, "max_completion_tokens": 24, "stop": None, "ignore_eos": True},
    ),
    "guidellm chat": (
        "chat",
        CHAT | OFTEN | {"max_tokens": 24, "max_completion_tokens": 24, "stop": None, "ignore_eos": True},
    ),
    "aiperf": (
        "chat",
        BARE_CHAT | USAGE | {"max_completion_tokens": 24, "min_tokens": 24, "ignore_eos": True},
    ),
    "llmperf": ("chat", BARE_CHAT | {"stream": True, "max_tokens": 24}),
    "inference-perf": ("text", PROMPT | USAGE | {"max_tokens": 24, "ignore_eos": True}),
}
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    headers = {"authorization": "Bearer EMPTY", "accept": "text/event-stream"}
    with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
        yield client


def test_probes_of_measuring_clients(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    models = client.get("/v1/models").json()
    assert models["object"] == "list"
    assert models["data"][0]["id"] == "demo"
    assert models["data"][0]["max_model_len"] == 512
    probe = {"model": "demo", **BARE_CHAT, "max_completion_tokens": 1}
    assert client.post("/v1/chat/completions", json=probe).json()["usage"]["completion_tokens"] == 1
    for path in ("/get_server_info", "/flush_cache", "/v1/nothing"):  # of other servers
        assert client.get(path).status_code == 404


@pytest.mark.parametrize("name", SENT)
def test_a_streamed_request(client: httpx.Client, name: str) -> None:
    kind, body = SENT[name]
    events: list[str] = []
    sent_id = f"bench-{abs(hash(name)) % 10**6}"
    with client.stream(
        "POST", PATHS[kind], json={"model": "demo", **body}, headers={"x-request-id": sent_id}
    ) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].split(";")[0] == "text/event-stream"
        assert response.headers["x-request-id"] == sent_id
        for line in response.iter_lines():
            if line:
                assert line.startswith("data: ")
                events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    text, usage, reasons = "", None, []
    for event in map(json.loads, events):
        check_chunk(event, kind)
        for choice in event["choices"]:
            piece = choice["delta"].get("content") if kind == "chat" else choice["text"]
            text += piece or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        usage = event.get("usage") or usage
    assert len(reasons) == 1
    assert text
    if "stream_options" not in body:
        assert usage is None
        return
    assert usage is not None
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] <= 24
    if body.get("ignore_eos"):
        assert (usage["completion_tokens"], reasons) == (24, ["length"])
    assert json.loads(events[-1])["choices"] == []
    same = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    if body.get("temperature") == 0.0:
        whole = client.post(PATHS[kind], json={"model": "demo", **same}).json()
        first = whole["choices"][0]
        assert (first["message"]["content"] if kind == "chat" else first["text"]) == text
        assert whole["usage"]["completion_tokens"] == usage["completion_tokens"]


def check_chunk(event: dict[str, Any], kind: str) -> None:
    assert event["object"] == ("chat.completion.chunk" if kind == "chat" else "text_completion")
    assert event["model"] == "demo"
    assert isinstance(event["created"], int)
    for choice in event["choices"]:
        assert choice["index"] == 0
        assert choice["finish_reason"] in (None, "stop", "length")


def test_an_embedded_client_that_closes_after_each_request(server: ServerProcess) -> None:
    for _ in range(3):
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "demo", "prompt": "Hi", "max_tokens": 2, "stream": True},
            headers={"connection": "close"},
        )
        assert answer.text.endswith("data: [DONE]\n\n")
