"""`SharedStart`: concurrent calls share one start of the model, which is retried if the worker ends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from penstock.config import PipelineConfig
from penstock.errors import CheckpointError, PenstockError, UnavailableError
from penstock.llm.async_llm import AsyncLLM
from penstock.ray.shared_start import MAX_STARTS, SharedStart


class FakeModel:
    """A model whose first starts raise the given errors, one error per start."""

    def __init__(self, *errors: PenstockError) -> None:
        self.errors = list(errors)
        self.num_starts = 0

    async def start(self) -> None:
        self.num_starts += 1
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)


async def test_concurrent_calls_share_a_start() -> None:
    model = FakeModel()
    start = SharedStart(model.start)
    await asyncio.gather(*(start() for _ in range(5)))
    await start()
    assert model.num_starts == 1


async def test_a_worker_that_ends_during_the_load_is_started_again() -> None:
    model = FakeModel(*[UnavailableError("ended")] * (MAX_STARTS - 1))
    start = SharedStart(model.start, retry_seconds=0)
    await asyncio.gather(start(), start())
    assert model.num_starts == MAX_STARTS


async def test_the_number_of_starts_is_limited_and_a_later_call_starts_again() -> None:
    model = FakeModel(*[UnavailableError("ended")] * MAX_STARTS)
    start = SharedStart(model.start, retry_seconds=0)
    failures = await asyncio.gather(start(), start(), return_exceptions=True)
    assert [type(failure) for failure in failures] == [UnavailableError] * 2
    assert model.num_starts == MAX_STARTS
    await start()
    assert model.num_starts == MAX_STARTS + 1


async def test_an_error_of_the_checkpoint_is_raised_without_another_start() -> None:
    model = FakeModel(CheckpointError("model", "no such folder"))
    with pytest.raises(CheckpointError, match="no such folder"):
        await SharedStart(model.start, retry_seconds=0)()
    assert model.num_starts == 1


async def test_a_cancelled_call_does_not_cancel_the_start() -> None:
    model = FakeModel()
    start = SharedStart(model.start)
    first_call = asyncio.ensure_future(start())
    await asyncio.sleep(0)
    first_call.cancel()
    await asyncio.gather(first_call, return_exceptions=True)
    await start()
    assert model.num_starts == 1


def find_child_processes() -> set[int]:
    """Return the ids of the child processes of this process."""
    return {
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    }


async def test_a_model_starts_although_its_worker_is_killed_during_the_load() -> None:
    children_before = find_child_processes()
    llm = AsyncLLM.from_config(PipelineConfig.from_flat({"model_path": "demo"}, "argument"))
    start = SharedStart(llm.start, retry_seconds=0)
    start_task = asyncio.ensure_future(start())
    while not (worker_pids := find_child_processes() - children_before):
        await asyncio.sleep(0.01)
    for pid in worker_pids:
        os.kill(pid, signal.SIGKILL)
    try:
        await start_task
        (output,) = await llm.generate("Once upon a time")
        assert output.token_ids
        assert not find_child_processes() & worker_pids
    finally:
        await llm.close()
