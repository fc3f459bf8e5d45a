"""Requests of common load generators, and the response fields that the load generators need.

The requests follow the documentation of the load generators.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.documents import ROOT
from support.server_process import ServerProcess

DEMO = ROOT / "penstock" / "demo"
CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]}]}
TEXT_CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}]}
STREAM_WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
STREAM_WITH_CONTINUOUS_USAGE = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
PROMPT = {"prompt": "Once upon a time"}

REQUESTS = {
    "vllm openai-chat": (
        "chat",
        CHAT | STREAM_WITH_USAGE | {"temperature": 0.0, "max_completion_tokens": 24},
    ),
    "vllm openai-chat, ignore_eos": (
        "chat",
        CHAT
        | STREAM_WITH_USAGE
        | {"temperature": 0.0, "max_completion_tokens": 24, "ignore_eos": True, "min_tokens": 24},
    ),
    "vllm openai": (
        "text",
        PROMPT
        | STREAM_WITH_USAGE
        | {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 24, "logprobs": None},
    ),
    "vllm openai, tokens": (
        "text",
        {"prompt": [5, 6, 7] * 10, "max_tokens": 24, "ignore_eos": True} | STREAM_WITH_USAGE,
    ),
    "sglang": (
        "text",
        PROMPT | STREAM_WITH_USAGE | {"temperature": 0.0, "best_of": 1, "max_tokens": 24, "ignore_eos": True},
    ),
    "sglang chat": (
        "chat",
        TEXT_CHAT | STREAM_WITH_USAGE | {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True},
    ),
    "guidellm text": (
        "text",
        PROMPT
        | STREAM_WITH_CONTINUOUS_USAGE
        | {"max_tokens": 24, "max_completion_tokens": 24, "stop": None, "ignore_eos": True},
    ),
    "guidellm chat": (
        "chat",
        CHAT
        | STREAM_WITH_CONTINUOUS_USAGE
        | {"max_tokens": 24, "max_completion_tokens": 24, "stop": None, "ignore_eos": True},
    ),
    "aiperf": (
        "chat",
        TEXT_CHAT | STREAM_WITH_USAGE | {"max_completion_tokens": 24, "min_tokens": 24, "ignore_eos": True},
    ),
    "llmperf": ("chat", TEXT_CHAT | {"stream": True, "max_tokens": 24}),
    "inference-perf": ("text", PROMPT | STREAM_WITH_USAGE | {"max_tokens": 24, "ignore_eos": True}),
}
CAPITALS = {"Germany": "Berlin", "France": "Paris"}
TASK_TEMPLATE = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
doc_to_text: "{{{{q}}}}"
doc_to_target: "{target}"
{output_lines}
"""
TASK_LINES = {
    False: {
        "target": "{{a}}",
        "output_lines": "output_type: multiple_choice\ndoc_to_choice: [Berlin, Paris]\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]",
    },
    True: {
        "target": "The capital of {{q.split(' ')[-1][:-1]}} is {{a}}.",
        "output_lines": "output_type: generate_until\ngeneration_kwargs: {until: [';'], max_gen_toks: 24}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]",
    },
}
"""Whether the task is a chat -> fields of `TASK_TEMPLATE`."""
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    headers = {"authorization": "Bearer EMPTY", "accept": "text/event-stream"}
    with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
        yield client


def test_probes_of_load_generators_are_answered(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    models = client.get("/v1/models").json()
    assert models["object"] == "list"
    assert models["data"][0]["id"] == "demo"
    assert models["data"][0]["max_model_len"] == 512
    probe = {"model": "demo", **TEXT_CHAT, "max_completion_tokens": 1}
    assert client.post("/v1/chat/completions", json=probe).json()["usage"]["completion_tokens"] == 1
    for path in ("/get_server_info", "/flush_cache", "/v1/nothing"):  # routes that this server does not have
        assert client.get(path).status_code == 404


@pytest.mark.parametrize("name", REQUESTS)
def test_streams_have_the_fields_that_load_generators_need(client: httpx.Client, name: str) -> None:
    kind, body = REQUESTS[name]
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
            text_part = choice["delta"].get("content") if kind == "chat" else choice["text"]
            text += text_part or ""
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
    common_fields = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    if body.get("temperature") == 0.0:
        response = client.post(PATHS[kind], json={"model": "demo", **common_fields}).json()
        answer_choice = response["choices"][0]
        assert (answer_choice["message"]["content"] if kind == "chat" else answer_choice["text"]) == text
        assert response["usage"]["completion_tokens"] == usage["completion_tokens"]


def check_chunk(event: dict[str, Any], kind: str) -> None:
    assert event["object"] == ("chat.completion.chunk" if kind == "chat" else "text_completion")
    assert event["model"] == "demo"
    assert isinstance(event["created"], int)
    for choice in event["choices"]:
        assert choice["index"] == 0
        assert choice["finish_reason"] in (None, "stop", "length")


def run_tool(command: list[str], server: ServerProcess, *, folder: Path) -> str:
    """Run an installed program and return its output. Replace ``URL`` and ``MODEL`` in the command."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    words = [word.replace("URL", server.url).replace("MODEL", str(DEMO)) for word in command]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    child = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout


@pytest.mark.peers
def test_guidellm_measures_the_server(server: ServerProcess, tmp_path: Path) -> None:
    backend, data = (
        "kind=openai_http,target=URL,model=demo",
        "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
    )
    limit_flags = ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"]
    input_flags = ["--tokenizer", "kind=hf_auto,model=MODEL", "--data", data]
    path = tmp_path / "report.json"
    output_flags = ["--disable-console", "--output", f"kind=json,path={path}"]
    run_tool(
        ["guidellm", "run", "--backend", backend, *limit_flags, *input_flags, *output_flags],
        server,
        folder=tmp_path,
    )
    [benchmark] = json.loads(path.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 4
    assert not benchmark["requests"]["errored"]


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_lm_eval_measures_an_accuracy_of_one(server: ServerProcess, tmp_path: Path, kind: str) -> None:
    """The demo model selects each capital, or generates each sentence in a chat, so the accuracy is 1."""
    rows = [
        {"q": f"What is the capital of {country}?", "a": capital} for country, capital in CAPITALS.items()
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    is_chat = kind.startswith("local-chat")
    (tmp_path / "capitals.yaml").write_text(
        TASK_TEMPLATE.format(data=tmp_path / "data.jsonl", **TASK_LINES[is_chat])
    )
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    arguments = f"model=demo,base_url=URL{path},tokenizer=MODEL,num_concurrent=2"
    command = ["lm_eval", "--model", kind, "--model_args", arguments, "--tasks", "capitals"]
    task_flags = ["--include_path", str(tmp_path), *(["--apply_chat_template"] if is_chat else [])]
    output = run_tool([*command, *task_flags], server, folder=tmp_path)
    [row] = [line.split("|") for line in output.splitlines() if line.startswith("|capitals")]
    assert row[7].strip() == "1"


def test_a_client_with_a_connection_for_each_request_is_answered(server: ServerProcess) -> None:
    for _ in range(3):
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "demo", "prompt": "Hi", "max_tokens": 2, "stream": True},
            headers={"connection": "close"},
        )
        assert answer.text.endswith("data: [DONE]\n\n")
