"""`WorkerRouter` over fake engine clients, without worker processes."""

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


def list_request_ids(engine: FakeEngine) -> list[str]:
    return [context.request_id for context in engine.contexts]


async def test_a_request_goes_to_the_worker_with_the_fewest_requests() -> None:
    first, second = FakeEngine(is_paused=True), FakeEngine(is_paused=True)
    router = WorkerRouter([first, second])
    generations = [router.submit(request(name)) for name in "abc"]
    assert (list_request_ids(first), list_request_ids(second)) == (["a", "c"], ["b"])
    generations[0].cancel()
    generations[2].cancel()
    assert (first.cancelled, second.cancelled) == (["a", "c"], [])
    router.submit(request("d"))
    assert list_request_ids(first) == ["a", "c", "d"]
    assert router.num_outstanding == 2


async def test_each_request_gets_the_output_of_its_worker() -> None:
    router = WorkerRouter([FakeEngine("first"), FakeEngine("second")])
    generations = [router.submit(request(name)) for name in "ab"]
    assert [text(await read(generation)) for generation in generations] == ["first", "second"]
    assert router.num_outstanding == 0


async def test_a_worker_that_is_not_ready_gets_no_request() -> None:
    first, second = FakeEngine(state="restarting"), FakeEngine(num_outstanding=9)
    router = WorkerRouter([first, second])
    router.submit(request("a"))
    assert (list_request_ids(first), list_request_ids(second)) == ([], ["a"])
    second.state = "restarting"
    with pytest.raises(UnavailableError, match="restarting"):
        router.submit(request("b"))


async def test_a_request_that_a_full_worker_refuses_goes_to_another() -> None:
    class FullEngine(FakeEngine):
        def submit(self, context: TextContext) -> Generation:
            raise OverloadedError("the queue is full")

    second = FakeEngine()
    WorkerRouter([FullEngine(), second]).submit(request("a"))
    assert list_request_ids(second) == ["a"]
    with pytest.raises(OverloadedError, match="full"):
        WorkerRouter([FullEngine(), FakeEngine(state="restarting"), FullEngine()]).submit(request("b"))


async def test_an_id_in_use_at_any_worker_is_refused() -> None:
    router = WorkerRouter([FakeEngine(is_paused=True), FakeEngine(is_paused=True)])
    generation = router.submit(request("a"))
    with pytest.raises(InputError, match="is running already"):
        router.submit(request("a"))
    generation.cancel()
    router.submit(request("a"))


async def test_a_custom_routing_policy_is_used() -> None:
    class SaltPolicy:
        def choose(self, context: TextContext, digests: object, loads: object, workers: int) -> int:
            assert workers == 0b11
            return int(context.cache_salt or 0)

    first, second = FakeEngine(), FakeEngine()
    router = WorkerRouter([first, second], SaltPolicy())
    for name, salt in {"a": "1", "b": "1", "c": "0"}.items():
        router.submit(request(name, cache_salt=salt))
    assert (list_request_ids(first), list_request_ids(second)) == (["c"], ["a", "b"])


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


async def test_request_ended_resolves_for_any_worker() -> None:
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
    class RefusingEngine(FakeEngine):
        async def load_adapter(self, name: str, path: str) -> None:
            raise CheckpointNotFoundError(path, "does not exist")

    first = FakeEngine(adapters=dict(before))
    with pytest.raises(CheckpointNotFoundError):
        await WorkerRouter([first, RefusingEngine()]).load_adapter("tone", "/new")
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


async def test_two_real_workers_share_requests() -> None:
    async with client_of(FakePipeline.saying("x")) as first, client_of(FakePipeline.saying("x")) as second:
        router = WorkerRouter([first, second])
        generations = [router.submit(request(str(number))) for number in range(6)]
        assert (first.num_outstanding, second.num_outstanding) == (3, 3)
        assert [ids(await read(generation)) for generation in generations] == [[120]] * 6
        assert router.stats.num_prompt_tokens == 6 * 2


# -- Prefixes and sessions -------------------------------------------------------------------------------


CACHING_INFO = msgspec.structs.replace(INFO, block_size=4, prefix_limits=[], max_batch_size=3)


def make_caching_engine(**fields: Any) -> FakeEngine:
    return FakeEngine(info=CACHING_INFO, is_paused=True, **fields)


def make_stored_event(prompt: str) -> BlocksStored:
    return BlocksStored(digests_of(request("", prompt), CACHING_INFO), None, [])


async def test_a_request_goes_to_the_worker_that_has_its_prefix() -> None:
    first, second = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first, second])
    second.report(make_stored_event("x" * 400))
    router.submit(request("a", "x" * 400))
    router.submit(request("b", "x" * 300 + "y" * 100))
    router.submit(request("c", "y" * 400))  # second has no prefix of it and has two requests
    assert (list_request_ids(first), list_request_ids(second)) == (["c"], ["a", "b"])


async def test_the_worker_with_the_longest_prefix_gets_the_request() -> None:
    first, second, third = make_caching_engine(), make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first, second, third])
    first.report(make_stored_event("x" * 100))
    second.report(make_stored_event("x" * 400))
    third.report(make_stored_event("x" * 100))
    router.submit(request("a", "x" * 400))
    assert list_request_ids(second) == ["a"]


async def test_load_outweighs_a_short_prefix() -> None:
    first, second = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first, second])
    prompt = "x" * (2 * REQUEST_COST + 40)
    second.report(make_stored_event(prompt))
    for name in "abc":  # the prefix outweighs two requests, but not three
        router.submit(request(name, prompt, cache_salt=None))
    assert (list_request_ids(first), list_request_ids(second)) == ([], ["a", "b", "c"])
    router.submit(request("d", prompt))
    assert list_request_ids(first) == ["d"]


@pytest.mark.parametrize("event", ["removed", "cleared", "restarted"])
async def test_an_evicted_prefix_does_not_affect_routing(event: str) -> None:
    first, second = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first, second])
    prompt = "x" * 400
    second.report(make_stored_event(prompt))
    second.report(BlocksRemoved(make_stored_event(prompt).digests) if event == "removed" else BlocksCleared())
    router.submit(request("a", prompt))
    assert (list_request_ids(first), list_request_ids(second)) == (["a"], [])
    assert router.prefixes.num_blocks == 0


async def test_requests_with_one_prompt_that_arrive_together_share_a_worker() -> None:
    first, second = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first, second])
    router.submit(request("other"))
    generations = [router.submit(request(name, "x" * 2000)) for name in "ab"]
    assert (list_request_ids(first), list_request_ids(second)) == (["other"], ["a", "b"])
    for generation in generations:
        generation.cancel()
    router.submit(request("d", "x" * 2000))  # no block was stored
    assert list_request_ids(second)[2:] == ["d"]
    router.submit(request("e", "y" * 2000))
    assert list_request_ids(first) == ["other", "e"]


async def test_prompts_with_salt_echo_or_adapter_do_not_match_cached_prefixes() -> None:
    first, second = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first, second])
    second.report(make_stored_event("x" * 400))
    for name, fields in {
        "a": {"cache_salt": "salt"},
        "b": {"log_probabilities": 1, "log_probabilities_echo": True},
        "c": {"adapter": "tone"},
    }.items():
        router.submit(request(name, "x" * 400, **fields)).cancel()
    assert (list_request_ids(first), list_request_ids(second)) == (["a", "b", "c"], [])


async def test_a_session_stays_with_its_worker() -> None:
    first, second = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first, second])
    router.submit(request("busy"))
    router.submit(request("a", session_id="s"))
    router.submit(request("b", session_id="s"))
    assert list_request_ids(second) == ["a", "b"]
    for number in range(2):
        router.submit(request(f"c{number}", session_id="s"))
    assert list_request_ids(second)[2:] == ["c0", "c1"]
    router.submit(request("d", session_id="s"))  # 4 requests against 1: the difference is the batch size of 3
    assert list_request_ids(second)[4:] == ["d"]
    router.submit(request("e", session_id="s"))
    assert list_request_ids(first) == ["busy", "e"]
    router.submit(request("f", session_id="s"))  # the session has moved
    assert list_request_ids(first) == ["busy", "e", "f"]


async def test_a_session_leaves_a_worker_that_is_down() -> None:
    first, second = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first, second])
    router.submit(request("a", session_id="s"))
    first.state = "restarting"
    router.submit(request("b", session_id="s"))
    assert list_request_ids(second) == ["b"]


async def test_the_number_of_sessions_is_bounded() -> None:
    policy = PrefixAware(PrefixMap(), 4, 1)
    with patch("penstock.worker.routing.MAX_SESSIONS", 2):
        for session in "abc":
            policy.choose(request("", session_id=session), [], [0, 1], 0b11)
    assert list(policy._sessions) == ["b", "c"]


def test_digests_equal_those_of_the_kv_cache() -> None:
    for limits, length in (((), 30), ((16,), 30), ((16,), 12)):
        manager, context = kv_manager(20, key_limits=limits), text_context(range(length), cache_salt="mine")
        manager.record_events()
        advance(manager, context)
        (event,) = manager.take_events()
        assert isinstance(event, BlocksStored)
        info = msgspec.structs.replace(CACHING_INFO, prefix_limits=list(manager.prefix_limits or ()))
        digests = digests_of(text_context(range(length), cache_salt="mine"), info)
        assert digests == event.digests[: (length - 1) // 4]


def test_a_cache_without_prefixes_has_no_digests() -> None:
    manager = kv_manager(20, enable_prefix_caching=False)
    assert manager.prefix_limits is None
    assert digests_of(request("", "x" * 40), msgspec.structs.replace(CACHING_INFO, prefix_limits=None)) == []


def test_only_the_first_blocks_are_hashed() -> None:
    context = text_context([1] * 4 * (MAX_DIGESTS + 5), max_length=10_000)
    assert len(digests_of(context, CACHING_INFO)) == MAX_DIGESTS


# -- Sleep, profiles and reload --------------------------------------------------------------------------


async def test_controls_are_sent_to_all_workers() -> None:
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


def make_reloadable_router(old: list[FakeEngine], new: list[FakeEngine]) -> WorkerRouter:
    return WorkerRouter(old, make_worker=new.__getitem__)


async def test_a_reload_replaces_workers_one_by_one() -> None:
    old = [
        make_caching_engine(adapters={"tone": "/tone"}, num_restarts=2),
        make_caching_engine(num_restarts=3),
    ]
    new = [make_caching_engine(adapters={"other": "/other"}), make_caching_engine()]
    router = make_reloadable_router(old, new)
    running = [router.submit(request(name)) for name in "ab"]
    old[0].report(make_stored_event("x" * 400))
    reload = asyncio.create_task(router.reload(60))
    await asyncio.sleep(0.05)
    assert old[0].calls == []  # it still has a request
    router.submit(request("c"))
    assert (list_request_ids(old[0]), list_request_ids(old[1])) == (["a"], ["b", "c"])
    running[0].cancel()
    await asyncio.sleep(0.1)
    assert (old[0].calls, new[0].calls) == (["stop 0"], ["start"])
    assert new[0].adapters == {"tone": "/tone"}
    assert router.prefixes.num_blocks == 0
    assert old[1].calls == []
    router.submit(request("d"))
    assert list_request_ids(new[0]) == ["d"]
    for context in list(old[1].contexts):
        old[1]._cancel(context.request_id)
    await reload
    assert router.workers == new
    assert router.num_restarts == 5
    new[1].report(make_stored_event("x" * 400))
    old[1].report(BlocksCleared())  # ignored: the old worker has no listener
    assert router.prefixes.num_blocks > 0


async def test_a_reload_ends_requests_that_exceed_the_grace_period() -> None:
    old, new = [FakeEngine(is_paused=True), FakeEngine()], [FakeEngine(), FakeEngine()]
    router = make_reloadable_router(old, new)
    router.submit(request("a"))
    await asyncio.wait_for(router.reload(0.05), 5)
    assert router.workers == new


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


async def test_a_failed_reload_leaves_the_other_workers() -> None:
    old = [FakeEngine(), FakeEngine()]
    router = make_reloadable_router(old, [FakeEngine(start_error=InputError("no model")), FakeEngine()])
    with pytest.raises(InputError, match="no model"):
        await router.reload(1)
    assert (router.workers, old[1].state) == (old, "ready")
    router.submit(request("a"))
    assert list_request_ids(old[1]) == ["a"]


async def test_concurrent_reload_and_sleep_are_refused() -> None:
    old = [FakeEngine(is_paused=True), FakeEngine()]
    router = make_reloadable_router(old, [FakeEngine(), FakeEngine()])
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


def search_depths(caches: list[set[bytes]], digests: list[bytes], workers: int) -> dict[int, int]:
    depths = {}
    for number, cache in enumerate(caches):
        depth = next((index for index, digest in enumerate(digests) if digest not in cache), len(digests))
        if workers >> number & 1 and depth:
            depths[number] = depth
    return depths


@pytest.mark.parametrize("seed", range(20))
def test_depths_equal_those_of_a_linear_search(seed: int) -> None:
    rng, prefixes = random.Random(seed), PrefixMap()
    count = rng.randrange(1, 9)
    caches: list[set[bytes]] = [set() for _ in range(count)]
    prompts = [[b"%d" % rng.randrange(3)] for _ in range(6)]
    for prompt in prompts:  # chained digests: equal digests have equal predecessors
        for _ in range(rng.randrange(12)):
            prompt.append(prompt[-1] + b"%d" % rng.randrange(2))
    running: list[tuple[int, Sequence[bytes]]] = []
    for _ in range(60):
        worker, prompt = rng.randrange(count), rng.choice(prompts)
        stored = prompt[: rng.randrange(len(prompt) + 1)]
        match rng.randrange(5):
            case 0:
                prefixes.update(worker, [BlocksStored(stored, None, [])])
                caches[worker] |= set(stored)
            case 1:
                prefix = rng.choice(prompt)
                removed = {digest for digest in caches[worker] if digest.startswith(prefix)}
                prefixes.update(worker, [BlocksRemoved(sorted(removed))])
                caches[worker] -= removed
            case 2:
                running.append((worker, prefixes.expect(worker, prompt)))
            case 3 if running:
                prefixes.clear_expected(running.pop(rng.randrange(len(running)))[1])
            case _ if rng.random() < 0.1:
                prefixes.update(worker, [BlocksCleared()])
                caches[worker].clear()
        if not running:
            workers, digests = rng.randrange(1 << count), rng.choice(prompts)
            assert prefixes.depths(digests, workers) == search_depths(caches, digests, workers)
    for _, digests in running:
        prefixes.clear_expected(digests)
    assert prefixes._expected == {}
    assert prefixes.depths([], 1) == {}


def test_expected_blocks_exclude_stored_blocks() -> None:
    prefixes, digests = PrefixMap(), [b"%d" % number for number in range(100)]
    prefixes.update(1, [BlocksStored(digests[:10], None, [])])
    first = prefixes.expect(1, digests)
    assert first == digests[10 : 10 + MAX_EXPECTED]
    assert prefixes.depths(digests, 0b11) == {1: 10 + MAX_EXPECTED}
    second = prefixes.expect(1, digests)
    prefixes.clear_expected(first)
    assert prefixes.depths(digests, 0b11) == {1: 10 + MAX_EXPECTED}
    prefixes.clear_expected(second)
    assert prefixes.depths(digests, 0b11) == {1: 10}
