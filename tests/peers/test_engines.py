"""Peer engines in child processes: requests, signals, errors, memory, logs and environment variables."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from support import fake_engine

from benchmarks.peers.engines import Engine, EngineError

LOAD = {"model": "somewhere/model", "encoding": "int4", "num_threads": 2, "max_length": 64, "num_prompts": 1}


def start_engine(tmp_path: Path, fault: str = "", watch_memory: bool = False) -> Engine:
    command = [sys.executable, fake_engine.__file__, fault]
    return Engine(command, LOAD, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, tmp_path / "log", watch_memory)


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_state(pid: int, expected: str) -> bool:
    """Return whether a process reaches a state within 5 s. An exited process counts as a zombie (Z)."""
    for _ in range(500):
        try:
            result = process_state(pid)
        except OSError:
            result = "Z"
        if result == expected:
            return True
        time.sleep(0.01)
    return False


def test_answers_have_tokens_and_times_and_printed_lines_go_to_the_log(tmp_path: Path) -> None:
    with start_engine(tmp_path) as engine:
        answer = engine.generate([[3, 4], [7]], 3)
        assert answer["tokens"] == [[5, 6, 7], [8, 9, 10]]
        assert (
            0 <= answer["first_output_seconds"] <= answer["total_seconds"] - 0.01
        )  # the fake engine waits 0.01 s between its two outputs
        assert answer["num_first_tokens"] == 2
        assert engine.generate([[1]], 1)["tokens"] == [[2]]
        assert engine.versions["python"] == ".".join(map(str, sys.version_info[:3]))
        assert engine.versions["pytest"] == pytest.__version__
        assert engine.seconds_since_start() >= engine.seconds_to_load > 0
    assert "loading model\na line of the native library" in (tmp_path / "log").read_text()


def test_engine_and_children_are_suspended_between_requests_and_end_together(tmp_path: Path) -> None:
    with start_engine(tmp_path, "child") as engine:
        child_pid = int((tmp_path / "log").read_text().split("child ")[1].split()[0])
        for _ in range(2):
            assert wait_for_state(engine.process_id, "T")
            assert wait_for_state(child_pid, "T")
            engine.generate([[1]], 2)
    assert wait_for_state(engine.process_id, "Z")
    assert wait_for_state(child_pid, "Z")


def test_error_of_an_ended_engine_shows_exit_status_and_log(tmp_path: Path) -> None:
    with (
        start_engine(tmp_path, "dies") as engine,
        pytest.raises(
            EngineError, match=r"ended with exit status 1; the last lines of .*log:\n[^$]*out of tokens"
        ),
    ):
        engine.generate([[1]], 2)
    assert wait_for_state(engine.process_id, "Z")


def test_engine_that_fails_to_load_leaves_no_process(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'], stdout=2)\n"
        "sys.exit(f'{child.pid} no memory')"
    )
    with pytest.raises(
        EngineError, match=r"ended with exit status 1; the last lines of .*:\n[0-9]+ no memory"
    ) as caught:
        Engine([sys.executable, "-c", code], LOAD, {}, tmp_path / "log")
    child_pid = int(str(caught.value).splitlines()[-1].split()[0])
    assert wait_for_state(child_pid, "Z")


def test_answer_with_too_few_tokens_is_an_error(tmp_path: Path) -> None:
    with start_engine(tmp_path, "short") as engine:
        with pytest.raises(
            EngineError, match=r"expected 2 answers of 4 tokens, got 2 answers of \[3\] tokens"
        ):
            engine.generate([[1], [2]], 4)
        with pytest.raises(EngineError, match=r"of \[0\] tokens"):
            engine.generate([[1]], 1)


def test_memory_includes_child_processes(tmp_path: Path) -> None:
    peaks = []
    for fault in ("", "large"):
        with start_engine(tmp_path, fault, watch_memory=True) as engine:
            for _ in range(5):  # several requests, so that memory is sampled during at least one request
                engine.generate([[1]], 1)
            peaks.append(engine.peak_bytes())
            assert engine.peak_bytes() == peaks[-1]
    peak_bytes, peak_bytes_with_child = peaks
    assert 1 << 20 < peak_bytes < 64 << 20
    # The child allocates 32 MiB and has its own interpreter.
    assert 32 << 20 < peak_bytes_with_child - peak_bytes < 64 << 20


def test_log_of_an_earlier_engine_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of yesterday\n")
    start_engine(tmp_path).close()
    assert "yesterday" not in (tmp_path / "log").read_text()


def test_engine_inherits_the_environment_except_openmp_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "100")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PEER_OWN", "own")
    code = (
        "import os, sys; names = 'PEER_TEST PEER_OWN OMP_NUM_THREADS GOMP_SPINCOUNT PYTHONPATH'.split();"
        "sys.exit(' '.join(os.environ.get(name, '-') for name in names))"
    )
    environment = {"PEER_TEST": "hello", "OMP_NUM_THREADS": "2"}
    with pytest.raises(EngineError, match=f"hello own 2 - .*{os.path.basename(Path(__file__).parents[2])}"):
        Engine([sys.executable, "-c", code], LOAD, environment, tmp_path / "log")
