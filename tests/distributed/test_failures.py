"""A rank that exits or hangs makes the step fail, and `WorkerClient` restarts all ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from support.pipeline_steps import generate_tokens, make_context
from support.rank_pair import RankPair
from support.tiny_llm import write_tiny_llm

from penstock.assembly import load_runtime, load_tokenizer
from penstock.config import PipelineConfig
from penstock.errors import ConfigError, RankFailedError, UnavailableError
from penstock.kernels.reference import ReferenceOps
from penstock.llm import LLM
from penstock.pipelines.core import SamplingParams, TextContext, TokenGeneratorRequest
from penstock.worker.client import WorkerClient
from penstock.worker.results import Generation


@pytest.mark.parametrize(
    ("signal_number", "reason"),
    [
        (signal.SIGKILL, "rank 1 of 2 has ended .killed by SIGKILL."),
        pytest.param(signal.SIGSTOP, "lost their connection .a rank did not answer", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "shares_memory", [pytest.param(True, id="shared_memory"), pytest.param(False, id="torch")]
)
def test_steps_raise_the_reason_after_a_rank_is_lost_and_close_ends_ranks_above_0(
    tiny_checkpoint: Path, signal_number: signal.Signals, reason: str, shares_memory: bool
) -> None:
    if signal_number is signal.SIGSTOP and not shares_memory:
        reason = "lost their connection"
    rank_pair = RankPair(timeout=5.0, shares_memory=shares_memory)
    try:
        pipeline = rank_pair.load(tiny_checkpoint)
        generate_tokens(pipeline, [make_context([1, 2, 3], 2)])
        os.kill(rank_pair.processes.pids[0], signal_number)
        start_time = time.monotonic()
        with pytest.raises(RankFailedError, match=reason):
            generate_tokens(pipeline, [make_context([1, 2, 3], 2)])
        with pytest.raises(RankFailedError, match=reason):  # fails immediately, without computing the step
            generate_tokens(pipeline, [make_context([1, 2, 3], 2)])
        assert time.monotonic() - start_time < 60
    finally:
        rank_pair.close()
    assert not any(_is_running(pid) for pid in rank_pair.processes.pids)


def test_a_failed_step_raises_the_error_of_its_rank(tiny_checkpoint: Path) -> None:
    rank_pair = RankPair(timeout=30.0)
    try:
        # On rank 1, the operation raises a TypeError, because `int` does not accept its arguments.
        patch = partial(setattr, ReferenceOps, "store_kv", int)
        pipeline = rank_pair.load(tiny_checkpoint, patch, kernels="reference")
        with pytest.raises(RankFailedError, match=r"a step failed on rank 1 of 2 \(TypeError: "):
            generate_tokens(pipeline, [make_context([1, 2, 3], 2)])
    finally:
        rank_pair.close()


def test_a_load_raises_the_error_that_occurs_on_all_ranks(tmp_path: Path) -> None:
    # All ranks detect that 3 ranks cannot divide 2 kv heads. The first error is raised.
    checkpoint = write_tiny_llm(tmp_path)
    with pytest.raises(ConfigError, match="3 ranks cannot divide 4 attention heads with 2 kv heads"):
        LLM(checkpoint, max_length=32, tensor_parallel_size=3)


@pytest.mark.slow
async def test_all_ranks_restart_after_one_is_killed(tiny_checkpoint: Path) -> None:
    config = PipelineConfig.from_flat({"model_path": str(tiny_checkpoint), "tensor_parallel_size": 2})
    tokenizer = load_tokenizer(config)
    client = WorkerClient(partial(load_runtime, config))

    def make_numbered_context(number: int, num_tokens: int) -> TextContext:
        params = SamplingParams(max_new_tokens=num_tokens, seed=number, ignore_eos=True)
        request_id = f"{number}-{time.monotonic()}"
        prompt = "Once upon a time"
        request = TokenGeneratorRequest(request_id, number, "tiny", prompt, sampling_params=params)
        context: TextContext = tokenizer.build_context(request)
        return context

    await client.start()
    try:
        expected_tokens = await _read_tokens(client.submit(make_numbered_context(1, 8)))
        for killed_rank in (1, 0, 1):
            worker_pid = client.info.pid  # rank 0
            (rank_1_pid,) = _other_rank_pids(worker_pid)
            generations = [client.submit(make_numbered_context(number, 100)) for number in range(8)]
            await anext(generations[0])
            os.kill(rank_1_pid if killed_rank else worker_pid, signal.SIGKILL)
            outcomes = await asyncio.gather(*map(_read_tokens, generations), return_exceptions=True)
            assert any(isinstance(outcome, UnavailableError) for outcome in outcomes)
            assert all(isinstance(outcome, UnavailableError | list) for outcome in outcomes)
            await _wait_until(lambda old_pid=worker_pid: client.is_alive and client.info.pid != old_pid)
            assert await _read_tokens(client.submit(make_numbered_context(1, 8))) == expected_tokens
            await _wait_until(lambda pid=rank_1_pid: not _is_running(pid))
        # All ranks are replaced without a request if a rank exits while the server is idle.
        worker_pid = client.info.pid
        (rank_1_pid,) = _other_rank_pids(worker_pid)
        os.kill(rank_1_pid, signal.SIGKILL)
        await _wait_until(lambda: client.is_alive and client.info.pid != worker_pid)
        assert await _read_tokens(client.submit(make_numbered_context(1, 8))) == expected_tokens
        (rank_1_pid,) = _other_rank_pids(client.info.pid)
    finally:
        await client.stop(0)
    await _wait_until(lambda: not _is_running(rank_1_pid))


async def _read_tokens(generation: Generation) -> list[int]:
    return [token for delta in [delta async for delta in generation] for token in delta.token_ids]


async def _wait_until(condition: object, seconds: float = 120.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        await asyncio.sleep(0.05)


def _other_rank_pids(worker_pid: int) -> list[int]:
    """Return the process ids of the ranks that a worker, which is rank 0, has started."""
    children = Path(f"/proc/{worker_pid}/task/{worker_pid}/children").read_text().split()
    return [
        int(child_pid)
        for child_pid in children
        if b"distributed" in Path(f"/proc/{child_pid}/cmdline").read_bytes()
    ]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
