"""The router over two fake engine clients, without any process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from support.engines import INFO, FakeEngine
from support.paged import advance, kv_manager, text_context
from support.workers import client_of, ids, read, request, text

from penstock.errors import (
    CheckpointNotFoundError,
    InputError,
    OverloadedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from penstock.pipelines.core import TextContext
from penstock.pipelines.core.cache_events import BlocksCleared, BlocksRemoved, BlocksStored
from penstock.testing import FakePipeline
from penstock.worker.engine_client import EngineState
from penstock.worker.messages import WorkerStats
from penstock.worker.prefix_map import MAX_EXPECTED, PrefixMap
from penstock.worker.results import Generation
from penstock.worker.router import WorkerRouter
from penstock.worker.routing import MAX_DIGESTS, REQUEST_COST, PrefixAware, digests_of


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


async def test_a_full_worker_passes_the_request_on() -> None:
    class Full(FakeEngine):
        def submit(self, context: TextContext) -> Generation:
            raise OverloadedError("the queue is full")

    second = FakeEngine()
    WorkerRouter([Full(), second]).submit(request("a"))
    assert names(second) == ["a"]
    with pytest.raises(OverloadedError, match="full"):
        WorkerRouter([Full(), FakeEngine(state="restarting"), Full()]).submit(request("b"))


async def test_an_id_in_use_at_any_worker_is_refused() -> None:
    router = WorkerRouter([FakeEngine(is_paused=True), FakeEngine(is_paused=True)])
    generation = router.submit(request("a"))
    with pytest.raises(InputError, match="is running already"):
        router.submit(request("a"))
    generation.cancel()
    router.submit(request("a"))


async def test_the_policy_is_replaceable() -> None:
    class BySalt:
        def choose(self, context: TextContext, digests: object, loads: object, workers: int) -> int:
            assert workers == 0b11
            return int(context.cache_salt or 0)

    first, second = FakeEngine(), FakeEngine()
    router = WorkerRouter([first, second], BySalt())
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
        (("asleep", "restarting"), "asleep"),
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


# -- Prefixes and sessions -------------------------------------------------------------------------------


CACHING = msgspec.structs.replace(INFO, block_size=4, prefix_limits=[], max_batch_size=3)


def caching_engine(**fields: Any) -> FakeEngine:
    return FakeEngine(info=CACHING, is_paused=True, **fields)


def stored(prompt: str) -> BlocksStored:
    return BlocksStored(digests_of(request("", prompt), CACHING), None, [])


async def test_a_request_goes_to_the_worker_that_has_its_prefix() -> None:
    first, second = caching_engine(), caching_engine()
    router = WorkerRouter([first, second])
    second.report(stored("x" * 400))
    router.submit(request("a", "x" * 400))
    router.submit(request("b", "x" * 300 + "y" * 100))
    router.submit(request("c", "y" * 400))  # second has a prefix of nothing, and two requests
    assert (names(first), names(second)) == (["c"], ["a", "b"])


async def test_the_longer_prefix_wins() -> None:
    first, second, third = caching_engine(), caching_engine(), caching_engine()
    router = WorkerRouter([first, second, third])
    first.report(stored("x" * 100))
    second.report(stored("x" * 400))
    third.report(stored("x" * 100))
    router.submit(request("a", "x" * 400))
    assert names(second) == ["a"]


async def test_load_outweighs_a_short_prefix() -> None:
    first, second = caching_engine(), caching_engine()
    router = WorkerRouter([first, second])
    prompt = "x" * (2 * REQUEST_COST + 40)
    second.report(stored(prompt))
    for name in "abc":  # the second pays two requests for the prefix, and not three
        router.submit(request(name, prompt, cache_salt=None))
    assert (names(first), names(second)) == ([], ["a", "b", "c"])
    router.submit(request("d", prompt))
    assert names(first) == ["d"]


@pytest.mark.parametrize("event", ["removed", "cleared", "restarted"])
async def test_an_evicted_prefix_does_not_attract_requests(event: str) -> None:
    first, second = caching_engine(), caching_engine()
    router = WorkerRouter([first, second])
    prompt = "x" * 400
    second.report(stored(prompt))
    second.report(BlocksRemoved(stored(prompt).digests) if event == "removed" else BlocksCleared())
    router.submit(request("a", prompt))
    assert (names(first), names(second)) == (["a"], [])
    assert router.prefixes.num_blocks == 0


async def test_requests_with_one_prompt_that_arrive_together_share_a_worker() -> None:
    first, second = caching_engine(), caching_engine()
    router = WorkerRouter([first, second])
    router.submit(request("other"))
    generations = [router.submit(request(name, "x" * 2000)) for name in "ab"]
    assert (names(first), names(second)) == (["other"], ["a", "b"])
    for generation in generations:
        generation.cancel()
    router.submit(request("d", "x" * 2000))  # nothing was stored
    assert names(second)[2:] == ["d"]
    router.submit(request("e", "y" * 2000))
    assert names(first) == ["other", "e"]


async def test_salted_prompts_and_those_without_a_prefix_cache_share_nothing() -> None:
    first, second = caching_engine(), caching_engine()
    router = WorkerRouter([first, second])
    second.report(stored("x" * 400))
    for name, fields in {
        "a": {"cache_salt": "mine"},
        "b": {"log_probabilities": 1, "log_probabilities_echo": True},
        "c": {"adapter": "tone"},
    }.items():
        router.submit(request(name, "x" * 400, **fields)).cancel()
    assert (names(first), names(second)) == (["a", "b", "c"], [])


async def test_a_session_stays_with_its_worker() -> None:
    first, second = caching_engine(), caching_engine()
    router = WorkerRouter([first, second])
    router.submit(request("busy"))
    router.submit(request("a", session_id="s"))
    router.submit(request("b", session_id="s"))
    assert names(second) == ["a", "b"]
    for number in range(2):
        router.submit(request(f"c{number}", session_id="s"))
    assert names(second)[2:] == ["c0", "c1"]
    router.submit(request("d", session_id="s"))  # 4 requests against 1: more than a batch of 3 would be
    assert names(second)[4:] == ["d"]
    router.submit(request("e", session_id="s"))
    assert names(first) == ["busy", "e"]
    router.submit(request("f", session_id="s"))  # it moved
    assert names(first) == ["busy", "e", "f"]


async def test_a_session_leaves_a_worker_that_is_down() -> None:
    first, second = caching_engine(), caching_engine()
    router = WorkerRouter([first, second])
    router.submit(request("a", session_id="s"))
    first.state = "restarting"
    router.submit(request("b", session_id="s"))
    assert names(second) == ["b"]


async def test_sessions_are_forgotten() -> None:
    policy = PrefixAware(PrefixMap(), 4, 1)
    with patch("penstock.worker.routing.MAX_SESSIONS", 2):
        for session in "abc":
            policy.choose(request("", session_id=session), [], [0, 1], 0b11)
    assert list(policy._sessions) == ["b", "c"]


def test_the_digests_are_those_of_the_kv_cache() -> None:
    for limits, length in (((), 30), ((16,), 30), ((16,), 12)):
        manager, context = kv_manager(20, key_limits=limits), text_context(range(length), cache_salt="mine")
        manager.record_events()
        advance(manager, context)
        (event,) = manager.take_events()
        assert isinstance(event, BlocksStored)
        info = msgspec.structs.replace(CACHING, prefix_limits=list(manager.prefix_limits or ()))
        found = digests_of(text_context(range(length), cache_salt="mine"), info)
        assert found == event.digests[: (length - 1) // 4]


def test_a_cache_without_prefixes_has_no_digests() -> None:
    manager = kv_manager(20, enable_prefix_caching=False)
    assert manager.prefix_limits is None
    assert digests_of(request("", "x" * 40), msgspec.structs.replace(CACHING, prefix_limits=None)) == []


def test_only_the_first_blocks_are_hashed() -> None:
    context = text_context([1] * 4 * (MAX_DIGESTS + 5), max_length=10_000)
    assert len(digests_of(context, CACHING)) == MAX_DIGESTS


# -- Sleep, profiles and reload --------------------------------------------------------------------------


async def test_controls_reach_all_workers() -> None:
    first, second = FakeEngine(), FakeEngine()
    router = WorkerRouter([first, second])
    await router.reset_prefix_cache()
    await router.start_profile()
    await router.stop_profile()
    await router.sleep(2, 0)
    assert router.state == "asleep"
    await router.wake_up()
    assert router.state == "ready"
    calls = ["reset_prefix_cache", "start_profile", "stop_profile", "sleep 2", "wake_up"]
    assert first.calls == second.calls == calls


async def test_if_one_worker_cannot_sleep_all_stay_awake() -> None:
    first, second = FakeEngine(), FakeEngine(control_error=UnsupportedFeatureError("sleep", "not here"))
    router = WorkerRouter([first, second])
    with pytest.raises(UnsupportedFeatureError):
        await router.sleep(1, 0)
    assert (first.state, second.state) == ("ready", "ready")


def reloadable(old: list[FakeEngine], new: list[FakeEngine]) -> WorkerRouter:
    return WorkerRouter(old, make_worker=new.__getitem__)


async def test_a_reload_replaces_one_worker_after_the_other() -> None:
    old = [caching_engine(adapters={"tone": "/tone"}, num_restarts=2), caching_engine(num_restarts=3)]
    new = [caching_engine(adapters={"other": "/other"}), caching_engine()]
    router = reloadable(old, new)
    running = [router.submit(request(name)) for name in "ab"]
    old[0].report(stored("x" * 400))
    reload = asyncio.create_task(router.reload(60))
    await asyncio.sleep(0.05)
    assert old[0].calls == []  # it has a request
    router.submit(request("c"))
    assert (names(old[0]), names(old[1])) == (["a"], ["b", "c"])
    running[0].cancel()
    await asyncio.sleep(0.1)
    assert (old[0].calls, new[0].calls) == (["stop 0"], ["start"])
    assert new[0].adapters == {"tone": "/tone"}
    assert router.prefixes.num_blocks == 0
    assert old[1].calls == []
    router.submit(request("d"))
    assert names(new[0]) == ["d"]
    for name in list(old[1].contexts):
        old[1]._cancel(name.request_id)
    await reload
    assert router.workers == new
    assert router.num_restarts == 5
    new[1].report(stored("x" * 400))
    old[1].report(BlocksCleared())  # has no listener
    assert router.prefixes.num_blocks > 0


async def test_requests_that_outlast_the_grace_end_with_their_worker() -> None:
    old, new = [FakeEngine(is_paused=True), FakeEngine()], [FakeEngine(), FakeEngine()]
    router = reloadable(old, new)
    router.submit(request("a"))
    await asyncio.wait_for(router.reload(0.05), 5)
    assert router.workers == new


async def test_a_single_worker_ends_after_its_replacement_has_started() -> None:
    calls: list[str] = []

    class Recording(FakeEngine):
        async def start(self) -> None:
            calls.append("start")

        async def stop(self, grace: float) -> None:
            calls.append("stop")

    router = WorkerRouter([Recording()], make_worker=lambda number: Recording())
    await router.reload(1)
    assert calls == ["start", "stop"]


async def test_a_failed_reload_leaves_the_other_workers() -> None:
    old = [FakeEngine(), FakeEngine()]
    router = reloadable(old, [FakeEngine(start_error=InputError("no model")), FakeEngine()])
    with pytest.raises(InputError, match="no model"):
        await router.reload(1)
    assert (router.workers, old[1].state) == (old, "ready")
    router.submit(request("a"))
    assert names(old[1]) == ["a"]


async def test_two_reloads_at_once_are_refused() -> None:
    old = [FakeEngine(is_paused=True), FakeEngine()]
    router = reloadable(old, [FakeEngine(), FakeEngine()])
    generation = router.submit(request("a"))
    reload = asyncio.create_task(router.reload(60))
    await asyncio.sleep(0)
    for call in (router.reload(1), router.sleep(1, 0)):
        with pytest.raises(UnavailableError, match="is being reloaded"):
            await call
    generation.cancel()
    await reload
    router.state  # noqa: B018
    await router.sleep(2, 0)
    with pytest.raises(UnavailableError, match="asleep"):
        await router.reload(1)


# -- The map of prefixes ---------------------------------------------------------------------------------


def plain_depths(caches: list[set[bytes]], digests: list[bytes], workers: int) -> dict[int, int]:
    found = {}
    for number, cache in enumerate(caches):
        depth = next((at for at, digest in enumerate(digests) if digest not in cache), len(digests))
        if workers >> number & 1 and depth:
            found[number] = depth
    return found


@pytest.mark.parametrize("seed", range(20))
def test_depths_equal_a_plain_search(seed: int) -> None:
    draws, prefixes = random.Random(seed), PrefixMap()
    count = draws.randrange(1, 9)
    caches: list[set[bytes]] = [set() for _ in range(count)]
    prompts = [[b"%d" % draws.randrange(3)] for _ in range(6)]
    for prompt in prompts:  # digests of chains: equal ones have equal predecessors
        for _ in range(draws.randrange(12)):
            prompt.append(prompt[-1] + b"%d" % draws.randrange(2))
    running: list[tuple[int, Sequence[bytes]]] = []
    for _ in range(60):
        worker, prompt = draws.randrange(count), draws.choice(prompts)
        stored = prompt[: draws.randrange(len(prompt) + 1)]
        match draws.randrange(5):
            case 0:
                prefixes.update(worker, [BlocksStored(stored, None, [])])
                caches[worker] |= set(stored)
            case 1:
                prefix = draws.choice(prompt)
                gone = {digest for digest in caches[worker] if digest.startswith(prefix)}
                prefixes.update(worker, [BlocksRemoved(sorted(gone))])
                caches[worker] -= gone
            case 2:
                running.append((worker, prefixes.expect(worker, prompt)))
            case 3 if running:
                prefixes.clear_expected(running.pop(draws.randrange(len(running)))[1])
            case _ if draws.random() < 0.1:
                prefixes.update(worker, [BlocksCleared()])
                caches[worker].clear()
        if not running:
            workers, digests = draws.randrange(1 << count), draws.choice(prompts)
            assert prefixes.depths(digests, workers) == plain_depths(caches, digests, workers)
    for _, recorded in running:
        prefixes.clear_expected(recorded)
    assert prefixes._expected == {}
    assert prefixes.depths([], 1) == {}


def test_expected_blocks_are_those_that_the_worker_does_not_have() -> None:
    prefixes, digests = PrefixMap(), [b"%d" % number for number in range(100)]
    prefixes.update(1, [BlocksStored(digests[:10], None, [])])
    recorded = prefixes.expect(1, digests)
    assert recorded == digests[10 : 10 + MAX_EXPECTED]
    assert prefixes.depths(digests, 0b11) == {1: 10 + MAX_EXPECTED}
    again = prefixes.expect(1, digests)
    prefixes.clear_expected(recorded)
    assert prefixes.depths(digests, 0b11) == {1: 10 + MAX_EXPECTED}
    prefixes.clear_expected(again)
    assert prefixes.depths(digests, 0b11) == {1: 10}
