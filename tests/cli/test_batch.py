"""``penstock batch run`` with the demo model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli import cli


def write_requests(path: Path, count: int, **fields: Any) -> None:
    lines = []
    for index in range(count):
        messages = [{"role": "user", "content": "What is the capital of Germany?"}]
        body = {"model": "demo", "messages": messages, "temperature": 0, **fields}
        lines.append(json.dumps({"custom_id": f"n{index}", "url": "/v1/chat/completions", "body": body}))
    path.write_text("\n".join(lines) + "\n")


def read_results(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line["response"] for line in lines}


def test_a_batch_file_is_run_and_can_be_continued(tmp_path: Path) -> None:
    input_file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(input_file, 6)
    with input_file.open("a") as file:
        file.write('{"custom_id": "bad", "url": "/v1/chat/completions", "body": {}}\n')
    output.write_text('{"custom_id": "n0", "response": {"kept": true}, "error": null}\n{"torn')
    arguments = ["batch", "run", str(input_file), "-o", str(output), "demo", "--kv-cache-memory", "64MiB"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1, result.output
    assert "1 lines have results, 6 lines are left" in result.stderr
    assert "6 lines in" in result.stderr
    assert "1 failed" in result.stderr
    actual = read_results(output)
    assert actual.pop("n0") == {"kept": True}
    assert actual.pop("bad")["status_code"] == 400
    assert len(actual) == 5
    for response in actual.values():
        assert response["body"]["choices"][0]["message"]["content"] == "The capital of Germany is Berlin."
    second_run = CliRunner().invoke(cli, arguments)
    assert second_run.exit_code == 0
    assert "7 lines have results, 0 lines are left" in second_run.stderr


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    input_file = tmp_path / "in.jsonl"
    write_requests(input_file, 1)
    result = CliRunner().invoke(cli, ["batch", "run", str(input_file), "-o", str(input_file)])
    assert "the output is the file of the requests" in result.output
    assert "Missing option" in CliRunner().invoke(cli, ["batch", "run", str(input_file)]).output


@pytest.mark.parametrize(
    ("signal_number", "count", "kill_fractions"),
    [
        (signal.SIGKILL, 100, (0.3,)),
        pytest.param(signal.SIGKILL, 10_000, (0.2, 0.6), marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
        pytest.param(signal.SIGINT, 2000, (0.5,), marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_batch_is_continued(
    tmp_path: Path, signal_number: int, count: int, kill_fractions: tuple[float, ...]
) -> None:
    """Each request has exactly one result, although a signal ends the process after some of the requests."""
    input_file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(input_file, count, max_tokens=4)
    command = [sys.executable, "-m", "penstock", "batch", "run", str(input_file), "-o", str(output)]
    for kill_fraction in kill_fractions:
        process = subprocess.Popen(command, start_new_session=True)
        while not output.exists() or output.read_bytes().count(b"\n") < kill_fraction * count:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal_number)
        process.wait(30)
        assert kill_fraction * count <= output.read_bytes().count(b"\n") < count
    subprocess.run(command, check=True)
    assert {*read_results(output)} == {f"n{index}" for index in range(count)}
