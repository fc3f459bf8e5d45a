"""`WorkerRouter` over fake engine clients, without worker processes."""

from __future__ import annotations

import asyncio

import pytest
from support.engines import FakeEngine
from support.prefix_caches import make_caching_engine, make_stored_event
from support.workers import delta_text, delta_token_ids, make_request, read_deltas, running_client

from penstock.errors import (
    CheckpointNotFoundError,
    InputError,
    OverloadedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from penstock.pipelines.core import TextContext
from penstock.pipelines.core.cache_events import BlocksCleared
from penstock.testing import FakePipeline
from penstock.worker.engine_client import EngineState
from penstock.worker.messages import WorkerStats
from penstock.worker.results import Generation
from penstock.worker.router import WorkerRouter


def list_request_ids(engine: FakeEngine) -> list[str]:
    return [context.request_id for context in engine.contexts]


async def test_a_request_goes_to_the_worker_with_the_fewest_requests() -> None:
    first_engine, second_engine = FakeEngine(is_paused=True), FakeEngine(is_paused=True)
    router = WorkerRouter([first_engine, second_engine])
    generations = [router.submit(make_request(name)) for name in "abc"]
    assert (list_request_ids(first_engine), list_request_ids(second_engine)) == (["a", "c"], ["b"])
    generations[0].cancel()
    generations[2].cancel()
    assert (first_engine.cancelled_ids, second_engine.cancelled_ids) == (["a", "c"], [])
    router.submit(make_request("d"))
    assert list_request_ids(first_engine) == ["a", "c", "d"]
    assert router.num_outstanding == 2


async def test_each_request_gets_the_output_of_its_worker() -> None:
    router = WorkerRouter([FakeEngine("first"), FakeEngine("second")])
    generations = [router.submit(make_request(name)) for name in "ab"]
    assert [delta_text(await read_deltas(generation)) for generation in generations] == ["first", "second"]
    assert router.num_outstanding == 0


async def test_a_worker_that_is_not_ready_gets_no_request() -> None:
    first_engine, second_engine = FakeEngine(state="restarting"), FakeEngine(num_outstanding=9)
    router = WorkerRouter([first_engine, second_engine])
    router.submit(make_request("a"))
    assert (list_request_ids(first_engine), list_request_ids(second_engine)) == ([], ["a"])
    second_engine.state = "restarting"
    with pytest.raises(UnavailableError, match="restarting"):
        router.submit(make_request("b"))


async def test_a_request_that_a_full_worker_refuses_goes_to_another_worker() -> None:
    class FullEngine(FakeEngine):
        def submit(self, context: TextContext) -> Generation:
            raise OverloadedError("the queue is full")

    second_engine = FakeEngine()
    WorkerRouter([FullEngine(), second_engine]).submit(make_request("a"))
    assert list_request_ids(second_engine) == ["a"]
    with pytest.raises(OverloadedError, match="full"):
        WorkerRouter([FullEngine(), FakeEngine(state="restarting"), FullEngine()]).submit(make_request("b"))


async def test_an_id_in_use_at_any_worker_is_refused() -> None:
    router = WorkerRouter([FakeEngine(is_paused=True), FakeEngine(is_paused=True)])
    generation = router.submit(make_request("a"))
    with pytest.raises(InputError, match="is running already"):
        router.submit(make_request("a"))
    generation.cancel()
    router.submit(make_request("a"))


async def test_a_custom_routing_policy_is_used() -> None:
    class SaltPolicy:
        def choose(self, context: TextContext, digests: object, loads: object, workers: int) -> int:
            assert workers == 0b11
            return int(context.cache_salt or 0)

    first_engine, second_engine = FakeEngine(), FakeEngine()
    router = WorkerRouter([first_engine, second_engine], SaltPolicy())
    for name, salt in {"a": "1", "b": "1", "c": "0"}.items():
        router.submit(make_request(name, cache_salt=salt))
    assert (list_request_ids(first_engine), list_request_ids(second_engine)) == (["c"], ["a", "b"])


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("ready", "restarting"), "ready"),
        (("stopped", "ready"), "ready"),
        (("stopped", "restarting"), "restarting"),
        (("stopping", "stopped"), "stopping"),
        (("stopped", "stopped"), "stopped"),
        (("asleep", "restarting"), "asleep"),
    ],
)
def test_the_router_has_the_state_of_its_workers_with_the_highest_precedence(
    states: tuple[EngineState, ...], expected: EngineState
) -> None:
    assert WorkerRouter([FakeEngine(state=state) for state in states]).state == expected


def test_statistics_are_summed_and_the_router_is_alive_while_one_worker_is_alive() -> None:
    first_engine = FakeEngine(
        stats=WorkerStats(num_steps=3, step_seconds=0.5), num_restarts=1, is_alive=False
    )
    second_engine = FakeEngine(stats=WorkerStats(num_steps=4, num_blocks=7), num_restarts=2)
    router = WorkerRouter([first_engine, second_engine])
    assert router.stats == WorkerStats(num_steps=7, step_seconds=0.5, num_blocks=7)
    assert (router.num_restarts, router.max_outstanding, router.is_alive) == (3, 128, True)
    second_engine.is_alive = False
    assert not router.is_alive


async def test_request_ended_resolves_when_one_request_ends() -> None:
    first_engine, second_engine = FakeEngine(is_paused=True), FakeEngine(is_paused=True)
    router = WorkerRouter([first_engine, second_engine])
    ended_future, generation = router.request_ended(), router.submit(make_request("a"))
    router.submit(make_request("b"))
    await asyncio.sleep(0)
    assert not ended_future.done()
    generation.cancel()
    await asyncio.wait_for(ended_future, 5)
    assert not router.request_ended().done()
    assert router.num_outstanding == 1


async def test_an_adapter_is_loaded_into_and_unloaded_from_all_workers() -> None:
    first_engine, second_engine = FakeEngine(), FakeEngine(adapters={"own": "/own"})
    router = WorkerRouter([first_engine, second_engine])
    await router.load_adapter("tone", "/tone")
    assert router.adapters == {"tone": "/tone"}
    assert "tone" in second_engine.adapters
    await router.unload_adapter("tone")
    assert (first_engine.adapters, second_engine.adapters) == ({}, {"own": "/own"})
    with pytest.raises(InputError, match="tone is not loaded"):
        await router.unload_adapter("tone")


@pytest.mark.parametrize("adapters_before", [{}, {"tone": "/old"}])
async def test_other_workers_restore_their_adapters_if_one_worker_refuses_an_adapter(
    adapters_before: dict[str, str],
) -> None:
    class RefusingEngine(FakeEngine):
        async def load_adapter(self, name: str, path: str) -> None:
            raise CheckpointNotFoundError(path, "does not exist")

    first_engine = FakeEngine(adapters=dict(adapters_before))
    with pytest.raises(CheckpointNotFoundError):
        await WorkerRouter([first_engine, RefusingEngine()]).load_adapter("tone", "/new")
    assert first_engine.adapters == adapters_before


async def test_all_workers_start_and_stop() -> None:
    first_engine, second_engine = FakeEngine(), FakeEngine()
    router = WorkerRouter([first_engine, second_engine])
    router.launch()
    await router.start()
    await router.stop(2)
    assert first_engine.calls == second_engine.calls == ["launch", "start", "stop 2"]


async def test_a_worker_that_does_not_start_stops_the_other_workers() -> None:
    first_engine, second_engine = FakeEngine(), FakeEngine(start_error=InputError("no model"))
    with pytest.raises(InputError, match="no model"):
        await WorkerRouter([first_engine, second_engine]).start()
    assert first_engine.calls == ["start", "stop 0"]


async def test_requests_are_distributed_to_two_real_workers() -> None:
    async with (
        running_client(FakePipeline.saying("x")) as first_engine,
        running_client(FakePipeline.saying("x")) as second_engine,
    ):
        router = WorkerRouter([first_engine, second_engine])
        generations = [router.submit(make_request(str(number))) for number in range(6)]
        assert (first_engine.num_outstanding, second_engine.num_outstanding) == (3, 3)
        assert [delta_token_ids(await read_deltas(generation)) for generation in generations] == [[120]] * 6
        assert router.stats.num_prompt_tokens == 6 * 2


# -- Sleep, profiles and reload --------------------------------------------------------------------------


async def test_controls_are_sent_to_all_workers() -> None:
    first_engine, second_engine = FakeEngine(), FakeEngine()
    router = WorkerRouter([first_engine, second_engine])
    await router.reset_prefix_cache()
    await router.start_profile()
    await router.stop_profile()
    await router.sleep(2, 0)
    assert router.state == "asleep"
    await router.wake_up()
    assert router.state == "ready"
    expected_calls = ["reset_prefix_cache", "start_profile", "stop_profile", "sleep 2", "wake_up"]
    assert first_engine.calls == second_engine.calls == expected_calls


async def test_all_workers_stay_awake_if_one_cannot_sleep() -> None:
    first_engine, second_engine = (
        FakeEngine(),
        FakeEngine(control_error=UnsupportedFeatureError("sleep", "not here")),
    )
    router = WorkerRouter([first_engine, second_engine])
    with pytest.raises(UnsupportedFeatureError):
        await router.sleep(1, 0)
    assert (first_engine.state, second_engine.state) == ("ready", "ready")


def make_reloadable_router(old_engines: list[FakeEngine], new_engines: list[FakeEngine]) -> WorkerRouter:
    return WorkerRouter(old_engines, make_worker=new_engines.__getitem__)


async def test_a_reload_replaces_workers_one_by_one() -> None:
    old_engines = [
        make_caching_engine(adapters={"tone": "/tone"}, num_restarts=2),
        make_caching_engine(num_restarts=3),
    ]
    new_engines = [make_caching_engine(adapters={"other": "/other"}), make_caching_engine()]
    router = make_reloadable_router(old_engines, new_engines)
    running_requests = [router.submit(make_request(name)) for name in "ab"]
    old_engines[0].report(make_stored_event("x" * 400))
    reload = asyncio.create_task(router.reload(60))
    await asyncio.sleep(0.05)
    assert old_engines[0].calls == []  # the worker still has a request
    router.submit(make_request("c"))
    assert (list_request_ids(old_engines[0]), list_request_ids(old_engines[1])) == (["a"], ["b", "c"])
    running_requests[0].cancel()
    await asyncio.sleep(0.1)
    assert (old_engines[0].calls, new_engines[0].calls) == (["stop 0"], ["start"])
    assert new_engines[0].adapters == {"tone": "/tone"}
    assert router.prefixes.num_blocks == 0
    assert old_engines[1].calls == []
    router.submit(make_request("d"))
    assert list_request_ids(new_engines[0]) == ["d"]
    for context in list(old_engines[1].contexts):
        old_engines[1]._cancel(context.request_id)
    await reload
    assert router.workers == new_engines
    assert router.num_restarts == 5
    new_engines[1].report(make_stored_event("x" * 400))
    old_engines[1].report(BlocksCleared())  # ignored, because this worker was replaced
    assert router.prefixes.num_blocks > 0


async def test_a_reload_waits_for_requests_at_most_the_grace_period() -> None:
    old_engines, new_engines = [FakeEngine(is_paused=True), FakeEngine()], [FakeEngine(), FakeEngine()]
    router = make_reloadable_router(old_engines, new_engines)
    router.submit(make_request("a"))
    await asyncio.wait_for(router.reload(0.05), 5)
    assert router.workers == new_engines


async def test_a_single_worker_stops_after_its_replacement_has_started() -> None:
    calls: list[str] = []

    class RecordingEngine(FakeEngine):
        async def start(self) -> None:
            calls.append("start")

        async def stop(self, grace: float) -> None:
            calls.append("stop")

    router = WorkerRouter([RecordingEngine()], make_worker=lambda number: RecordingEngine())
    await router.reload(1)
    assert calls == ["start", "stop"]


async def test_a_failed_reload_keeps_the_workers_that_are_not_replaced() -> None:
    old_engines = [FakeEngine(), FakeEngine()]
    router = make_reloadable_router(
        old_engines, [FakeEngine(start_error=InputError("no model")), FakeEngine()]
    )
    with pytest.raises(InputError, match="no model"):
        await router.reload(1)
    assert (router.workers, old_engines[1].state) == (old_engines, "ready")
    router.submit(make_request("a"))
    assert list_request_ids(old_engines[1]) == ["a"]


async def test_reload_and_sleep_are_refused_during_a_reload_and_reload_is_refused_while_asleep() -> None:
    old_engines = [FakeEngine(is_paused=True), FakeEngine()]
    router = make_reloadable_router(old_engines, [FakeEngine(), FakeEngine()])
    generation = router.submit(make_request("a"))
    reload = asyncio.create_task(router.reload(60))
    await asyncio.sleep(0)
    for call in (router.reload(1), router.sleep(1, 0)):
        with pytest.raises(UnavailableError, match="is being reloaded"):
            await call
    generation.cancel()
    await reload
    await router.sleep(2, 0)
    with pytest.raises(UnavailableError, match="asleep"):
        await router.reload(1)
