"""The router over two fake engine clients, without any process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from support.engines import FakeEngine
from support.workers import client_of, ids, read, request, text

from penstock.errors import CheckpointNotFoundError, InputError, UnavailableError
from penstock.pipelines.core import TextContext
from penstock.testing import FakePipeline
from penstock.worker.engine_client import EngineClient, EngineState
from penstock.worker.messages import WorkerStats
from penstock.worker.router import WorkerRouter


def names(engine: FakeEngine) -> list[str]:
    return [context.request_id for context in engine.contexts]


async def test_a_request_goes_to_the_worker_with_the_fewest_requests() -> None:
    first, second = FakeEngine(is_paused=True), FakeEngine(is_paused=True)
    router = WorkerRouter([first, second])
    generations = [router.submit(request(name)) for name in "abc"]
    assert (names(first), names(second)) == (["a", "c"], ["b"])
    generations[0].cancel()
    generations[2].cancel()
    assert (first.cancelled, second.cancelled) == (["a", "c"], [])
    router.submit(request("d"))
    assert names(first) == ["a", "c", "d"]
    assert router.num_outstanding == 2


async def test_results_come_from_the_chosen_worker() -> None:
    router = WorkerRouter([FakeEngine("first"), FakeEngine("second")])
    generations = [router.submit(request(name)) for name in "ab"]
    assert [text(await read(one)) for one in generations] == ["first", "second"]
    assert router.num_outstanding == 0


async def test_a_worker_that_is_not_ready_gets_no_request() -> None:
    first, second = FakeEngine(state="restarting"), FakeEngine(num_outstanding=9)
    router = WorkerRouter([first, second])
    router.submit(request("a"))
    assert (names(first), names(second)) == ([], ["a"])
    second.state = "restarting"
    with pytest.raises(UnavailableError, match="restarting"):
        router.submit(request("b"))


async def test_the_choice_of_the_worker_is_replaceable() -> None:
    def by_salt(workers: Sequence[EngineClient], context: TextContext) -> EngineClient:
        return workers[int(context.cache_salt or 0)]

    first, second = FakeEngine(), FakeEngine()
    router = WorkerRouter([first, second], choose=by_salt)
    for name, salt in {"a": "1", "b": "1", "c": "0"}.items():
        router.submit(request(name, cache_salt=salt))
    assert (names(first), names(second)) == (["c"], ["a", "b"])


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("ready", "restarting"), "ready"),
        (("stopped", "ready"), "ready"),
        (("stopped", "restarting"), "restarting"),
        (("stopping", "stopped"), "stopping"),
        (("stopped", "stopped"), "stopped"),
    ],
)
def test_the_state_is_the_one_closest_to_ready(
    states: tuple[EngineState, ...], expected: EngineState
) -> None:
    assert WorkerRouter([FakeEngine(state=state) for state in states]).state == expected


def test_health_and_counts_of_two_workers() -> None:
    first = FakeEngine(stats=WorkerStats(num_steps=3, step_seconds=0.5), num_restarts=1, is_alive=False)
    second = FakeEngine(stats=WorkerStats(num_steps=4, num_blocks=7), num_restarts=2)
    router = WorkerRouter([first, second])
    assert router.stats == WorkerStats(num_steps=7, step_seconds=0.5, num_blocks=7)
    assert (router.num_restarts, router.max_outstanding, router.is_alive) == (3, 128, True)
    second.is_alive = False
    assert not router.is_alive


async def test_the_end_of_a_request_of_any_worker_is_reported() -> None:
    first, second = FakeEngine(is_paused=True), FakeEngine(is_paused=True)
    router = WorkerRouter([first, second])
    ended, generation = router.request_ended(), router.submit(request("a"))
    router.submit(request("b"))
    await asyncio.sleep(0)
    assert not ended.done()
    generation.cancel()
    await asyncio.wait_for(ended, 5)
    assert not router.request_ended().done()
    assert router.num_outstanding == 1


async def test_an_adapter_is_loaded_into_all_workers() -> None:
    first, second = FakeEngine(), FakeEngine(adapters={"own": "/own"})
    router = WorkerRouter([first, second])
    await router.load_adapter("tone", "/tone")
    assert router.adapters == {"tone": "/tone"}
    assert "tone" in second.adapters
    await router.unload_adapter("tone")
    assert (first.adapters, second.adapters) == ({}, {"own": "/own"})
    with pytest.raises(InputError, match="tone is not loaded"):
        await router.unload_adapter("tone")


@pytest.mark.parametrize("before", [{}, {"tone": "/old"}])
async def test_an_adapter_that_one_worker_refuses_is_removed_from_the_others(before: dict[str, str]) -> None:
    class Refusing(FakeEngine):
        async def load_adapter(self, name: str, path: str) -> None:
            raise CheckpointNotFoundError(path, "does not exist")

    first = FakeEngine(adapters=dict(before))
    with pytest.raises(CheckpointNotFoundError):
        await WorkerRouter([first, Refusing()]).load_adapter("tone", "/new")
    assert first.adapters == before


async def test_all_workers_start_and_stop() -> None:
    first, second = FakeEngine(), FakeEngine()
    router = WorkerRouter([first, second])
    router.launch()
    await router.start()
    await router.stop(2)
    assert first.calls == second.calls == ["launch", "start", "stop 2"]


async def test_a_worker_that_does_not_start_stops_the_others() -> None:
    first, second = FakeEngine(), FakeEngine(start_error=InputError("no model"))
    with pytest.raises(InputError, match="no model"):
        await WorkerRouter([first, second]).start()
    assert first.calls == ["start", "stop 0"]


async def test_two_real_workers() -> None:
    async with client_of(FakePipeline.saying("x")) as first, client_of(FakePipeline.saying("x")) as second:
        router = WorkerRouter([first, second])
        generations = [router.submit(request(str(number))) for number in range(6)]
        assert (first.num_outstanding, second.num_outstanding) == (3, 3)
        assert [ids(await read(one)) for one in generations] == [[120]] * 6
        assert router.stats.num_prompt_tokens == 6 * 2
