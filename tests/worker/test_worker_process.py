"""Workers in real processes: kills, failed starts, hangs, memory limits, and the end of the parent."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support import workers
from support.workers import delta_text, delta_token_ids, make_request, read_deltas

from penstock.assembly import load_runtime, load_tokenizer
from penstock.config import PipelineConfig
from penstock.errors import (
    CheckpointNotFoundError,
    ConfigError,
    InsufficientMemoryError,
    TaskMismatchError,
    UnavailableError,
)
from penstock.pipelines.core import SamplingParams, TextContext, TokenGeneratorRequest, TTSContext
from penstock.worker import supervisor
from penstock.worker.client import WorkerClient
from penstock.worker.process import WorkerRuntime

pytestmark = pytest.mark.timeout(120)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_worker_killed_under_load_is_restarted() -> None:
    config = PipelineConfig.from_flat({"model_path": "demo", "max_length": 512})
    client = WorkerClient(partial(load_runtime, config))
    client.launch()
    tokenizer = load_tokenizer(config)

    def make_story_context(number: int, length: int) -> TextContext:
        params = SamplingParams(
            max_new_tokens=length, temperature=1.0, top_k=-1, seed=number, ignore_eos=True
        )
        return tokenizer.build_context(
            TokenGeneratorRequest(
                f"{time.time()}", number, "demo", "Once upon a time", sampling_params=params
            )
        )

    await client.start()
    try:
        info = client.info
        assert (info.max_length, info.vocab_size, info.lora_enabled) == (512, tokenizer.vocab_size, False)
        assert [phase for phase, _ in info.startup] == ["process", "tokenizer", "libraries", "model"]
        assert dict(info.memory)["max length"] == "512 tokens"
        assert info.isa.split()[0] in ("cpu", "reference")
        assert info.num_blocks * info.block_size >= 512
        expected = delta_token_ids(await read_deltas(client.submit(make_story_context(1, 8))))
        assert len(expected) == 8

        speech_context = TTSContext(prompt="", tokens=np.array([1]), max_length=9)
        with pytest.raises(TaskMismatchError, match="a TTSContext, is a request of another task"):
            await read_deltas(client.submit(speech_context))

        generations = [client.submit(make_story_context(number, 490)) for number in range(40)]
        first_delta = await anext(generations[0])
        assert first_delta.token_ids
        # The worker ignores SIGINT and SIGTERM, because its parent handles these signals.
        os.kill(info.pid, signal.SIGINT)
        os.kill(info.pid, signal.SIGTERM)
        await anext(generations[0])
        os.kill(info.pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*map(read_deltas, generations), return_exceptions=True)
        assert all(isinstance(outcome, UnavailableError) for outcome in outcomes)
        assert (client.state, client.is_alive, client.num_outstanding) == ("restarting", False, 0)
        await wait_until(lambda: client.state == "ready")
        assert client.info.pid != info.pid
        assert delta_token_ids(await read_deltas(client.submit(make_story_context(1, 8)))) == expected

        last_generation = client.submit(make_story_context(2, 100))
        folder = Path(client._supervisor._folder)
        await client.stop(30)
        assert len(delta_token_ids(await read_deltas(last_generation))) == 100
        assert not folder.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(client.info.pid, 0)
    finally:
        await client.stop(0)


async def test_a_missing_checkpoint_is_reported_by_start(tmp_path: Path) -> None:
    missing_path = str(tmp_path / "model")
    client = WorkerClient(partial(workers.load_checkpoint_runtime, missing_path))
    with pytest.raises(CheckpointNotFoundError) as exc_info:
        await client.start()
    assert missing_path in str(exc_info.value)
    assert exc_info.value.path == missing_path
    assert client.state == "stopped"


async def test_an_exit_during_the_start_is_reported() -> None:
    with pytest.raises(UnavailableError, match="ended while it started: exit status 7"):
        await WorkerClient(workers.exit_at_start).start()


async def test_a_factory_that_cannot_be_unpickled_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnavailableError, match="exit status 1"):
        await WorkerClient(_FactoryThatCannotBeUnpickled()).start()  # type: ignore[arg-type]
    assert "no such factory" in capfd.readouterr().err


class _FactoryThatCannotBeUnpickled:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return workers.raise_lookup_error, ("no such factory",)


async def test_a_worker_that_exits_in_a_forward_is_restarted() -> None:
    client = WorkerClient(workers.make_runtime_exiting_in_forward)
    await client.start()
    try:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="worker process ended unexpectedly"):
                await read_deltas(client.submit(make_request("a")))
            await wait_until(lambda: client.state == "ready")
        assert client.num_restarts == 2
    finally:
        await client.stop(0)


async def test_a_suspended_process_is_restarted_with_a_short_hang_limit() -> None:
    client = WorkerClient(workers.make_hello_runtime, hang_limit=1.5)
    await client.start()
    try:
        os.kill(client.info.pid, signal.SIGSTOP)
        with pytest.raises(UnavailableError, match="worker process ended unexpectedly"):
            await read_deltas(client.submit(make_request("a")))
        await wait_until(lambda: client.state == "ready")
        assert delta_text(await read_deltas(client.submit(make_request("a")))) == "Hello!"
    finally:
        await client.stop(1)


@pytest.mark.parametrize(
    "factory", [workers.make_runtime_hanging_in_forward, workers.make_runtime_holding_gil]
)
async def test_a_hanging_step_restarts_the_worker(factory: Callable[[], WorkerRuntime]) -> None:
    client = WorkerClient(factory, hang_limit=2.0)
    await client.start()
    try:
        first_pid = client.info.pid
        generations = [client.submit(make_request(name)) for name in ("hang", "other")]
        outcomes = await asyncio.gather(*map(read_deltas, generations), return_exceptions=True)
        hung_outcome = outcomes[0]
        assert isinstance(hung_outcome, UnavailableError)
        assert "the worker process ended unexpectedly (no progress for 2 s) and is being restarted" in str(
            hung_outcome
        )
        await wait_until(lambda: client.state == "ready")
        assert (client.info.pid != first_pid, client.num_restarts) == (True, 1)
        assert await read_deltas(client.submit(make_request("a")))
    finally:
        await client.stop(0)


async def test_a_slow_step_with_progress_is_not_killed() -> None:
    client = WorkerClient(workers.make_runtime_slow_in_forward, hang_limit=1.5)
    await client.start()
    try:
        start_time = time.monotonic()
        deltas = await read_deltas(client.submit(make_request("slow")))
        assert deltas[-1].status.is_done
        assert time.monotonic() - start_time >= 3
        assert (client.is_alive, client.num_restarts) == (True, 0)
    finally:
        await client.stop(0)


async def test_a_slow_load_with_progress_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_started_file = tmp_path / "load_started"
    client = WorkerClient(partial(workers.load_slowly, load_started_file), hang_limit=1.0)
    start_task = asyncio.create_task(client.start())
    await wait_until(load_started_file.exists)  # the imports before the load count no progress
    monkeypatch.setattr(supervisor, "MAX_LOAD_PAUSE", 1.5)
    await start_task
    await client.stop(0)


async def test_a_hanging_load_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_LOAD_PAUSE", 2.0)
    with pytest.raises(UnavailableError, match="ended while it started: no progress for"):
        await WorkerClient(workers.hang_at_start, hang_limit=2.0).start()


async def test_a_suspended_load_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PING_INTERVAL", 0.2)
    client = WorkerClient(workers.hang_at_start)
    start_task = asyncio.create_task(client.start())
    await wait_until(lambda: client._supervisor._connection is not None)
    os.kill(client._supervisor._connection._host._process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
    with pytest.raises(UnavailableError, match="ended while it started: suspended by a signal"):
        await start_task


async def test_a_suspended_process_is_restarted_before_the_hang_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "PING_INTERVAL", 0.2)
    client = WorkerClient(workers.make_hello_runtime)  # default hang limit: 20 s
    await client.start()
    try:
        first_pid = client.info.pid
        os.kill(first_pid, signal.SIGSTOP)
        with pytest.raises(UnavailableError, match="worker process ended unexpectedly"):
            await read_deltas(client.submit(make_request("a")))
        await wait_until(lambda: client.state == "ready")
        assert client.info.pid != first_pid
        assert delta_text(await read_deltas(client.submit(make_request("a")))) == "Hello!"
    finally:
        await client.stop(1)


async def test_a_resumed_process_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PING_INTERVAL", 0.5)
    client = WorkerClient(workers.make_hello_runtime)
    await client.start()
    try:
        os.kill(client.info.pid, signal.SIGSTOP)
        os.kill(client.info.pid, signal.SIGCONT)
        await asyncio.sleep(1.2)
        assert delta_text(await read_deltas(client.submit(make_request("a")))) == "Hello!"
        assert client.num_restarts == 0
    finally:
        await client.stop(1)


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """The worker ends although it is running steps. The folder with its sockets is removed."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio\n"
        "from support import workers\n"
        "from penstock.worker.client import WorkerClient\n"
        "async def main():\n"
        "    client = WorkerClient(workers.make_endless_runtime)\n"
        "    await client.start()\n"
        "    generation = client.submit(workers.make_request('a', max_length=2000))\n"
        "    await anext(generation)\n"
        "    print(client.info.pid, client._supervisor._folder, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"  # no __main__ guard: worker processes do not run the main module
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        parent.kill()
    deadline = time.monotonic() + 60
    while (is_running(int(pid)) or Path(folder.decode()).exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(int(pid))
    assert not Path(folder.decode()).exists()


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


# -- The limit on private memory ---------------------------------------------------------------------------

GIB = 1 << 30


@pytest.mark.parametrize(
    "name",
    [
        "python",
        pytest.param("torch", marks=pytest.mark.slow),
        pytest.param("grammar", marks=pytest.mark.slow),
    ],
)
async def test_a_worker_at_its_memory_limit_is_restarted(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The request that exceeds the limit fails with `InsufficientMemoryError`.

    A waiting request fails with `UnavailableError`.
    """
    client = WorkerClient(workers.make_runtime_exhausting_memory, memory_limit=GIB)
    await client.start()
    try:
        exceeding_generation, *waiting_generations = [
            client.submit(make_request(request_id)) for request_id in (name, "b", "c", "d")
        ]
        with pytest.raises(InsufficientMemoryError, match=r"limit of 1,073,741,824 bytes .*--worker-memory"):
            await read_deltas(exceeding_generation)
        last_outcome = (await asyncio.gather(*map(read_deltas, waiting_generations), return_exceptions=True))[
            -1
        ]
        assert type(last_outcome) is UnavailableError
        assert "out of memory: its private memory has reached --worker-memory-limit" in str(last_outcome)
        await wait_until(lambda: client.num_restarts == 1 and client.state == "ready")
        assert "reached its limit of private memory and ends" in capfd.readouterr().err
        assert delta_text(await read_deltas(client.submit(make_request("a")))) == "a" * 40
    finally:
        await client.stop(0)


async def test_a_load_beyond_the_memory_limit_is_reported() -> None:
    with pytest.raises(ConfigError, match="worker_memory_limit: the model cannot be loaded within 1,073,741"):
        await WorkerClient(workers.exceed_memory_at_start, memory_limit=GIB).start()


async def test_the_memory_limit_bounds_the_memory_in_the_plan() -> None:
    config = PipelineConfig.from_flat({"model_path": "demo", "max_length": 512})
    client = WorkerClient(partial(load_runtime, config), memory_limit=GIB)
    await client.start()
    try:
        rows = dict(client.info.memory)
        assert re.search(r"of 1\.0+ GiB|of \d+\.?\d* MiB", rows["free"]), rows
    finally:
        await client.stop(0)
