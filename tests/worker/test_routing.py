"""The choice of the worker by prefixes, load and sessions, with fake engine clients."""

from __future__ import annotations

from unittest.mock import patch

import msgspec
import pytest
from support.engines import FakeEngine
from support.kv_contexts import kv_manager, run_one_step, text_context
from support.prefix_caches import CACHING_INFO, make_caching_engine, make_stored_event
from support.workers import make_request

from penstock.pipelines.core.cache_events import BlocksCleared, BlocksRemoved, BlocksStored
from penstock.worker.messages import TextResult
from penstock.worker.prefix_map import PrefixMap
from penstock.worker.router import WorkerRouter
from penstock.worker.routing import MAX_DIGESTS, REQUEST_COST, PrefixAware, WorkerLoads, prompt_digests


def list_request_ids(engine: FakeEngine) -> list[str]:
    return [context.request_id for context in engine.contexts]


async def test_a_request_goes_to_the_worker_that_has_its_prefix() -> None:
    first_engine, second_engine = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first_engine, second_engine])
    second_engine.report(make_stored_event("x" * 400))
    router.submit(make_request("a", "x" * 400))
    router.submit(make_request("b", "x" * 300 + "y" * 100))
    # The second worker has two requests and no block of this prompt.
    router.submit(make_request("c", "y" * 400))
    assert (list_request_ids(first_engine), list_request_ids(second_engine)) == (["c"], ["a", "b"])


async def test_the_worker_with_the_longest_prefix_gets_the_request() -> None:
    first_engine, second_engine, third_engine = (
        make_caching_engine(),
        make_caching_engine(),
        make_caching_engine(),
    )
    router = WorkerRouter([first_engine, second_engine, third_engine])
    first_engine.report(make_stored_event("x" * 100))
    second_engine.report(make_stored_event("x" * 400))
    third_engine.report(make_stored_event("x" * 100))
    router.submit(make_request("a", "x" * 400))
    assert list_request_ids(second_engine) == ["a"]


async def test_load_outweighs_a_short_prefix() -> None:
    first_engine, second_engine = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first_engine, second_engine])
    prompt = "x" * (2 * REQUEST_COST + 40)
    second_engine.report(make_stored_event(prompt))
    for name in "abc":  # the cached prefix outweighs two running requests, but not three
        router.submit(make_request(name, prompt, cache_salt=None))
    assert (list_request_ids(first_engine), list_request_ids(second_engine)) == ([], ["a", "b", "c"])
    router.submit(make_request("d", prompt))
    assert list_request_ids(first_engine) == ["d"]


async def test_an_uncomputed_long_prompt_costs_more_than_several_decoding_requests() -> None:
    first_engine, second_engine = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first_engine, second_engine])
    computing_request = router.submit(make_request("a", "x" * 10 * REQUEST_COST))
    for name in "bcd":  # each of these requests costs about one sixth of the first request
        router.submit(make_request(name))
    assert list_request_ids(second_engine) == ["b", "c", "d"]
    computing_request.add(TextResult("a", [97]))
    router.submit(make_request("e"))
    assert list_request_ids(first_engine) == ["a", "e"]


async def test_the_end_of_a_request_removes_its_cost() -> None:
    first_engine, second_engine = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first_engine, second_engine])
    for has_result in (False, True):
        generation = router.submit(make_request("a", "x" * 10 * REQUEST_COST))
        if has_result:
            generation.add(TextResult("a", [97]))
        generation.cancel()
    assert (router._loads.costs, router._loads.num_requests) == ([0, 0], [0, 0])


async def test_the_cached_part_of_a_prompt_does_not_count_as_load() -> None:
    first_engine, second_engine = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first_engine, second_engine])
    first_engine.report(make_stored_event("x" * 2000))
    router.submit(make_request("a", "x" * 2000))
    router.submit(make_request("b", "y" * 40))
    assert (list_request_ids(first_engine), list_request_ids(second_engine)) == (["a"], ["b"])
    router.submit(make_request("c", "z" * 4))  # uncached tokens: 4 of a and 40 of b
    assert list_request_ids(first_engine) == ["a", "c"]
    router.submit(make_request("d", "x" * 2000)).cancel()
    assert list_request_ids(first_engine) == ["a", "c", "d"]


async def test_very_long_prompts_with_a_common_prefix_go_to_one_worker() -> None:
    first_engine, second_engine = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first_engine, second_engine])
    for name in "ab":
        tokens = [1] * 10 * MAX_DIGESTS * CACHING_INFO.block_size
        router.submit(text_context(tokens, max_length=30_000, request_id=name))
    assert (list_request_ids(first_engine), list_request_ids(second_engine)) == (["a", "b"], [])


@pytest.mark.parametrize("event", ["removed", "cleared"])
async def test_an_evicted_prefix_does_not_affect_routing(event: str) -> None:
    first_engine, second_engine = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first_engine, second_engine])
    prompt = "x" * 400
    second_engine.report(make_stored_event(prompt))
    second_engine.report(
        BlocksRemoved(make_stored_event(prompt).digests) if event == "removed" else BlocksCleared()
    )
    router.submit(make_request("a", prompt))
    assert (list_request_ids(first_engine), list_request_ids(second_engine)) == (["a"], [])
    assert router.prefixes.num_blocks == 0


async def test_concurrent_requests_with_equal_prompts_go_to_one_worker() -> None:
    first_engine, second_engine = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first_engine, second_engine])
    router.submit(make_request("other"))
    generations = [router.submit(make_request(name, "x" * 2000)) for name in "ab"]
    assert (list_request_ids(first_engine), list_request_ids(second_engine)) == (["other"], ["a", "b"])
    for generation in generations:
        generation.cancel()
    router.submit(make_request("d", "x" * 2000))  # no block is cached or expected: the idle worker gets it
    assert list_request_ids(second_engine)[2:] == ["d"]
    router.submit(make_request("e", "y" * 2000))
    assert list_request_ids(first_engine) == ["other", "e"]


async def test_prompts_with_salt_echo_or_adapter_do_not_match_cached_prefixes() -> None:
    first_engine, second_engine = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first_engine, second_engine])
    second_engine.report(make_stored_event("x" * 400))
    for name, fields in {
        "a": {"cache_salt": "mine"},
        "b": {"log_probabilities": 1, "log_probabilities_echo": True},
        "c": {"adapter": "tone"},
    }.items():
        router.submit(make_request(name, "x" * 400, **fields)).cancel()
    assert (list_request_ids(first_engine), list_request_ids(second_engine)) == (["a", "b", "c"], [])


async def test_a_session_stays_with_its_worker_up_to_a_difference_in_load() -> None:
    first_engine, second_engine = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first_engine, second_engine])
    router.submit(make_request("busy"))
    router.submit(make_request("a", session_id="s"))
    router.submit(make_request("b", session_id="s"))
    assert list_request_ids(second_engine) == ["a", "b"]
    for number in range(2):
        router.submit(make_request(f"c{number}", session_id="s"))
    assert list_request_ids(second_engine)[2:] == ["c0", "c1"]
    # The first worker has 1 request and the second worker has 4: the maximum difference of 3 is reached.
    router.submit(make_request("d", session_id="s"))
    assert list_request_ids(second_engine)[4:] == ["d"]
    router.submit(make_request("e", session_id="s"))
    assert list_request_ids(first_engine) == ["busy", "e"]
    router.submit(make_request("f", session_id="s"))  # the session now belongs to the first worker
    assert list_request_ids(first_engine) == ["busy", "e", "f"]


async def test_a_session_moves_from_a_worker_that_restarts() -> None:
    first_engine, second_engine = make_caching_engine(), make_caching_engine()
    router = WorkerRouter([first_engine, second_engine])
    router.submit(make_request("a", session_id="s"))
    first_engine.state = "restarting"
    router.submit(make_request("b", session_id="s"))
    assert list_request_ids(second_engine) == ["b"]


async def test_the_number_of_sessions_is_bounded() -> None:
    policy = PrefixAware(PrefixMap(), 4, 1)
    with patch("penstock.worker.routing.MAX_SESSIONS", 2):
        for session in "abc":
            policy.choose(make_request("", session_id=session), [], WorkerLoads(2), 0b11)
    assert list(policy._sessions) == ["b", "c"]


def test_digests_equal_those_of_the_kv_cache() -> None:
    for limits, length in (((), 30), ((16,), 30), ((16,), 12)):
        manager, context = kv_manager(20, key_limits=limits), text_context(range(length), cache_salt="mine")
        manager.record_events()
        run_one_step(manager, context)
        (event,) = manager.take_events()
        assert isinstance(event, BlocksStored)
        info = msgspec.structs.replace(CACHING_INFO, prefix_limits=list(manager.prefix_limits or ()))
        actual_digests = prompt_digests(text_context(range(length), cache_salt="mine"), info)
        assert actual_digests == event.digests[: (length - 1) // 4]


def test_a_cache_without_prefixes_has_no_digests() -> None:
    manager = kv_manager(20, enable_prefix_caching=False)
    assert manager.prefix_limits is None
    assert (
        prompt_digests(make_request("", "x" * 40), msgspec.structs.replace(CACHING_INFO, prefix_limits=None))
        == []
    )


def test_only_the_first_blocks_of_a_prompt_are_hashed() -> None:
    context = text_context([1] * 4 * (MAX_DIGESTS + 5), max_length=10_000)
    assert len(prompt_digests(context, CACHING_INFO)) == MAX_DIGESTS
