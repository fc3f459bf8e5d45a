"""``penstock bench serve`` against a live server of a fake model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.live_server import LiveServer, live_server

from penstock.cli import cli
from penstock.testing import FakePipeline


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    pipeline = FakePipeline(lambda context: 97 + len(context.generated_tokens) % 20)
    with live_server(pipeline=pipeline) as running_server:
        yield running_server


def run_bench(server: LiveServer | str, *flags: str) -> Result:
    url = server if isinstance(server, str) else server.url
    return CliRunner().invoke(
        cli, ["bench", "serve", "--url", url, "--requests", "6", "--warmup", "1", *flags]
    )


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("load_flags", [["--concurrency", "3"], ["--rate", "200"], ["--no-stream"]])
def test_a_measurement_writes_a_report_and_a_plot(
    server: LiveServer, endpoint: str, load_flags: list[str], tmp_path: Path
) -> None:
    file, plot = tmp_path / "a.json", tmp_path / "a.png"
    flags = ["--endpoint", endpoint, "--input-length", "20", "--output-length", "9", *load_flags]
    result = run_bench(server, *flags, "--json", str(file), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "6 of 6 requests" in result.stdout
    assert "end to end" in result.stdout
    assert "keep-alive" in result.stdout
    report = json.loads(file.read_text())
    summary: dict[str, Any] = report["summary"]
    assert (summary["completed"], summary["completion_tokens"], summary["errors"]) == (6, 54, {})
    num_template_tokens = len("user: \nassistant:") if endpoint == "chat" else 0
    assert {request["prompt_tokens"] for request in report["requests"]} == {20 + num_template_tokens}
    assert (summary["time_to_first_token"] is None) == ("--no-stream" in load_flags)
    assert report["settings"]["model"] == "demo"
    assert "api_key" not in report["settings"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_prompts_are_read_from_a_file(server: LiveServer, tmp_path: Path) -> None:
    prompts_file, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts_file.write_text('{"prompt": "Hello"}\n\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    result = run_bench(server, "--prompts", str(prompts_file), "--output-length", "2", "--json", str(report))
    assert result.exit_code == 0, result.output
    actual = [request["prompt_tokens"] for request in json.loads(report.read_text())["requests"]]
    assert sorted(actual) == [19, 19, 19, 22, 22, 22]
    plain_path = tmp_path / "prompts.txt"
    plain_path.write_text("one\ntwo\n")
    result = run_bench(
        server, "--prompts", str(plain_path), "--endpoint", "completions", "--json", str(report)
    )
    assert {request["prompt_tokens"] for request in json.loads(report.read_text())["requests"]} == {3}


def test_errors_are_printed_and_set_the_exit_status(server: LiveServer) -> None:
    result = run_bench(server, "--extra-body", '{"max_tokens": -1}', "--warmup", "0")
    assert result.exit_code == 1
    assert "0 of 6 requests" in result.stdout
    assert "6 x HTTP 400 (invalid_request_error): max_tokens" in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "other"], "every warm-up request failed: HTTP 404"),
        (["--extra-body", "[]"], "extra_body"),
        (["--prompts", "EMPTY"], "has no prompts"),
        (["--prompts", "WRONG.jsonl"], "line 3"),
    ],
)
def test_invalid_arguments_are_refused(
    server: LiveServer, flags: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "WRONG.jsonl").write_text('{"prompt": "a"}\n\n{"text": "a"}\n')
    arguments = [str(tmp_path / flag) if flag.isupper() or "WRONG" in flag else flag for flag in flags]
    if flags[0] == "--model":
        arguments += ["--prompts", str(tmp_path / "WRONG.jsonl")]
        (tmp_path / "WRONG.jsonl").write_text('{"prompt": "a"}\n')
    result = run_bench(server, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_unreachable_server_is_an_error() -> None:
    result = run_bench("http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "http://127.0.0.1:9 does not answer" in result.stderr


def test_control_c_writes_the_figures_so_far(server: LiveServer, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "penstock",
        "bench",
        "serve",
        "--url",
        server.url,
        "--requests",
        "100000",
    ]
    metrics_before = server.app_server.services.metrics.render()
    with subprocess.Popen(
        [
            *command,
            "--json",
            str(report),
            "--endpoint",
            "completions",
            "--warmup",
            "0",
            "--prompts",
            __file__,
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
    ) as process:
        server.wait_until(lambda: num_completed(server, metrics_before) > 20)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 130
    assert output.startswith("interrupted: ")
    summary = json.loads(report.read_text())["summary"]
    assert summary["is_interrupted"]
    assert summary["completed"] > 0
    assert summary["completed"] + summary["errors"].get("interrupted", 0) == summary["requests"]


def num_completed(server: LiveServer, metrics_before: bytes) -> float:
    name = b'penstock_requests_total{method="POST",route="/v1/completions",status="200"}'

    def count(text: bytes) -> float:
        rows = [line.split()[-1] for line in text.splitlines() if line.startswith(name)]
        return float(rows[0]) if rows else 0.0

    return count(server.app_server.services.metrics.render()) - count(metrics_before)
