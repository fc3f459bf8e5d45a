"""``penstock serve``: processes with the demo model or an embedder, invalid arguments, printed settings."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from support.tiny_embedder import write_tiny_embedder
from support.tiny_llm import write_tiny_llm

from penstock import LLM, SamplingParams
from penstock.cli import cli

SERVE_COMMAND = [sys.executable, "-m", "penstock", "serve"]
LIST_MODULES_AT_EXIT = """
import sys
from penstock.cli import cli
try:
    cli.main(["serve", *sys.argv[1:]])
finally:
    print(sorted({"torch", "transformers", "xgrammar", "llguidance"} & set(sys.modules)))
"""
"""A script that runs ``penstock serve`` and then prints which of four large packages are loaded."""


@contextmanager
def run_server(
    *flags: str, log: Path, command: Sequence[str] = SERVE_COMMAND
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """Run a server on a free port. Yield its process and a client, and kill the process at the end."""
    with (
        log.open("wb") as errors,
        subprocess.Popen([*command, "--port", "0", *flags], stderr=errors, stdout=subprocess.PIPE) as process,
    ):
        try:
            with httpx.Client(base_url=_url(process, log), timeout=60) as client:
                yield process, client
        finally:
            process.kill()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        match = re.search(r"serving \S+ at (http://\S+) ", log.read_text())
        if match:
            return match[1]
        time.sleep(0.02)
    raise AssertionError(log.read_text())


def test_a_server_checks_keys_restarts_its_worker_and_finishes_streams(tmp_path: Path) -> None:
    log = tmp_path / "log"
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    flags = ("--api-key", "one", "--api-key", "two")
    with run_server(*flags, log=log) as (process, client):
        assert client.get("/v1/models").status_code == 401
        client.headers["authorization"] = "Bearer two"
        assert client.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 5

        os.kill(_worker_pid(process), signal.SIGKILL)
        _wait_for(client, "/health", 503)
        refused_response = client.post("/v1/chat/completions", json=chat)
        assert refused_response.status_code == 503
        assert int(refused_response.headers["retry-after"]) >= 1
        _wait_for(client, "/ready", 200)
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        assert "penstock_worker_restarts_total 1.0" in client.get("/metrics").text

        body = {**chat, "max_tokens": 300, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b""
    log_lines = log.read_text().splitlines()
    assert any("event=worker state=restarting was=ready" in line for line in log_lines)
    assert any("outcome=length model=demo stream=true" in line for line in log_lines)
    assert not any("Traceback" in line for line in log_lines)
    assert not any("Hi" in line.split() for line in log_lines)


def test_a_server_of_an_embedder_checks_dimensions_and_exits(tmp_path: Path) -> None:
    model, log = write_tiny_embedder(tmp_path / "tiny", matryoshka_dimensions=[8]), tmp_path / "log"
    body = {"input": ["a cat", "a dog"], "dimensions": 4}
    with run_server(str(model), "--matryoshka-dimensions", "4,16", log=log) as (process, client):
        answer = client.post("/v1/embeddings", json=body).json()
        assert [len(entry["embedding"]) for entry in answer["data"]] == [4, 4]
        refusal_error = client.post("/v1/embeddings", json={**body, "dimensions": 8}).json()["error"]
        assert refusal_error["message"] == "dimensions must be one of 4, 16, 32, was 8"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    text = log.read_text()
    assert "server warm up" in text
    assert "Traceback" not in text


def _worker_pid(process: subprocess.Popen[bytes]) -> int:
    [worker] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(worker)


def _wait_for(client: httpx.Client, path: str, status: int) -> None:
    while client.get(path).status_code != status:
        time.sleep(0.02)


def test_a_server_with_speculation_gives_the_text_of_an_llm_without_speculation(tmp_path: Path) -> None:
    """Drafts are accepted. No package of LIST_MODULES_AT_EXIT is loaded. An invalid adapter is refused."""
    settings = {"deterministic": True, "quantization_encoding": "float32", "max_length": 512}
    prompt = "Lily lived near a blue lake. Lily lived near a blue lake. Lily lived near a"
    sampling_fields: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3, "top_p": 1.0, "top_k": -1},
    ]
    flags = ["--deterministic", "--quantization-encoding", "float32", "--max-length", "512"]
    flags += ["--speculative-method", "ngram", "--no-adaptive-speculation"]
    command = [sys.executable, "-c", LIST_MODULES_AT_EXIT]
    with run_server(*flags, log=tmp_path / "log", command=command) as (process, client):
        bodies = [
            {"model": "demo", "prompt": prompt, "max_tokens": 60, **fields} for fields in sampling_fields
        ]
        responses = [client.post("/v1/completions", json=body).json() for body in bodies]
        metrics = client.get("/metrics").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b"[]\n"
    accepted_match = re.search(r"^penstock_draft_tokens_accepted_total (\S+)", metrics, re.MULTILINE)
    assert accepted_match
    assert float(accepted_match[1]) > 0
    llm = LLM("demo", **settings)
    for fields, response in zip(sampling_fields, responses, strict=True):
        params = SamplingParams(max_new_tokens=60, **fields)
        [output] = llm.generate([prompt], params)
        assert response["choices"][0]["text"] == output.text
    assert "lora" in error_line("--lora", "nonsense")


@pytest.fixture(scope="module")
def malformed_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_tiny_llm(tmp_path_factory.mktemp("models") / "damaged")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return model


def test_a_model_that_cannot_be_loaded_gives_one_line(malformed_checkpoint: Path) -> None:
    completed = subprocess.run(
        [*SERVE_COMMAND, "--port", "0", "--model", str(malformed_checkpoint)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert completed.stderr.startswith("penstock: error: ")
    assert "model.safetensors" in completed.stderr
    assert completed.stderr.count("\n") == 1


def test_a_port_in_use_gives_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert error_line("--port", str(port)) == (
            f"penstock: error: port: cannot listen at 127.0.0.1:{port}: Address already in use\n"
        )


@pytest.mark.parametrize(
    ("flags", "expected_message"),
    [
        (["--port", "70000"], "port: must be a port number"),
        (["--port", "http"], "was 'http'"),
        (["--request-timeout", "0"], "request_timeout: must be a number of seconds above 0"),
        (["--shutdown-grace", "-1"], "0 or more"),
        (["--shutdown-grace", "inf"], "0 or more"),
        (["--max-body-size", "0"], "max_body_size"),
        (["--max-queue-size", "0"], "max_queue_size"),
        (["--unknown-fields", "ignore"], "one of error, warn"),
        (["--log-format", "xml"], "one of logfmt, json"),
        (["--cors-origins", "a b"], "texts without spaces"),
        (["--api-key", "a secret"], "api_key: must be texts without spaces, the given value is not"),
        (["--api-key", ""], "api_key: must be texts without spaces"),
        (["--model", "./nothing"], "no such folder"),
        (["--max-length", "0"], "max_length: must be"),
        (["--no-such-flag"], "No such option"),
        (["demo", "stray"], "unexpected extra argument"),
        (["demo", "--model", "other"], "the model is given twice"),
        (["--host", "192.0.2.1"], "host: cannot listen at 192.0.2.1:0"),
    ],
)
def test_invalid_flags_are_refused(flags: list[str], expected_message: str) -> None:
    line = error_line("--port", "0", *flags) if "--port" not in flags else error_line(*flags)
    assert expected_message in line
    assert "a secret" not in line


def test_the_error_names_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    assert "penstock serve needs uvicorn: pip install 'penstock-llm[serve]'" in error_line("--port", "0")


def error_line(*flags: str) -> str:
    """Return the one line on standard error of a refused command."""
    result = CliRunner().invoke(cli, ["serve", *flags])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


def print_config(*flags: str, command: str = "serve", **environment: str) -> dict[str, tuple[str, str]]:
    """Return the value and source of each setting, as ``--print-config`` prints them."""
    result = CliRunner().invoke(cli, [command, *flags, "--print-config"], env=environment)
    assert result.exit_code == 0, result.output
    rows = [re.split(r" {2,}", line) for line in result.stdout.splitlines()]
    return {name: (value, source) for name, value, source in rows}


def test_print_config_shows_values_and_sources_but_hides_keys(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    values = {"api_key": ["k1", "k2"], "max_length": 512, "port": 1234, "host": "::1"}
    file.write_text(json.dumps(values))
    printed_config = print_config(
        "--config-file", str(file), "--port", "5", PENSTOCK_CORS_ORIGINS="http://a, http://b"
    )
    assert printed_config["port"] == ("5", "flag")
    assert printed_config["host"] == ("::1", f"file {file}")
    assert printed_config["max_length"] == ("512", f"file {file}")
    assert printed_config["cors_origins"] == ("http://a,http://b", "environment PENSTOCK_CORS_ORIGINS")
    assert printed_config["api_key"] == ("(2 not shown)", f"file {file}")
    assert printed_config["shutdown_grace"] == ("30.0", "default")
    assert print_config(PENSTOCK_API_KEY="a,b,c")["api_key"] == (
        "(3 not shown)",
        "environment PENSTOCK_API_KEY",
    )
    assert print_config("--api-key", "a", PENSTOCK_API_KEY="b,c")["api_key"] == ("(1 not shown)", "flag")


def test_generate_reads_the_file_and_the_environment_of_serve(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text('max_length = 512\nport = 1234\napi_key = ["k"]\n')
    values = print_config("--config-file", str(file), command="generate", PENSTOCK_MAX_QUEUE_SIZE="7")
    assert values["max_length"][0] == "512"
    assert "port" not in values
    refused_result = CliRunner().invoke(cli, ["generate", "--print-config"], env={"PENSTOCK_PORT": "x"})
    assert refused_result.exit_code == 2
    assert "environment PENSTOCK_PORT" in refused_result.stderr
