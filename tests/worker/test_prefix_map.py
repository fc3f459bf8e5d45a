"""`PrefixMap`: the blocks that each worker has cached or is expected to cache."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from penstock.pipelines.core.cache_events import BlocksCleared, BlocksRemoved, BlocksStored
from penstock.worker.prefix_map import PrefixMap


def test_expected_blocks_count_for_the_depth_of_their_worker() -> None:
    prefixes, digests = PrefixMap(), [b"%d" % number for number in range(6)]
    prefixes.update(0, [BlocksStored(digests[:2], None, [])])
    assert [prefixes.depth(worker, digests) for worker in (0, 1)] == [2, 0]
    expected_digests = prefixes.expect(0, digests[:4])
    assert [prefixes.depth(worker, digests) for worker in (0, 1)] == [4, 0]
    assert prefixes.depths(digests, 0b11) == {0: 4}
    prefixes.clear_expected(expected_digests)
    assert prefixes.depth(0, digests) == 2


def search_depths(caches: list[set[bytes]], digests: list[bytes], workers: int) -> dict[int, int]:
    worker_depths = {}
    for number, cache in enumerate(caches):
        depth = next((index for index, digest in enumerate(digests) if digest not in cache), len(digests))
        if workers >> number & 1 and depth:
            worker_depths[number] = depth
    return worker_depths


@pytest.mark.parametrize("seed", range(20))
def test_depths_equal_those_of_a_linear_search(seed: int) -> None:
    rng, prefixes = random.Random(seed), PrefixMap()
    num_workers = rng.randrange(1, 9)
    caches: list[set[bytes]] = [set() for _ in range(num_workers)]
    prompts = [[b"%d" % rng.randrange(3)] for _ in range(6)]
    for prompt in prompts:  # as in a chain of blocks, equal digests have equal predecessors
        for _ in range(rng.randrange(12)):
            prompt.append(prompt[-1] + b"%d" % rng.randrange(2))
    running_requests: list[tuple[int, Sequence[bytes]]] = []
    for _ in range(60):
        worker, prompt = rng.randrange(num_workers), rng.choice(prompts)
        stored_digests = prompt[: rng.randrange(len(prompt) + 1)]
        match rng.randrange(5):
            case 0:
                prefixes.update(worker, [BlocksStored(stored_digests, None, [])])
                caches[worker] |= set(stored_digests)
            case 1:
                prefix = rng.choice(prompt)
                evicted_digests = {digest for digest in caches[worker] if digest.startswith(prefix)}
                prefixes.update(worker, [BlocksRemoved(sorted(evicted_digests))])
                caches[worker] -= evicted_digests
            case 2:
                running_requests.append((worker, prefixes.expect(worker, prompt)))
            case 3 if running_requests:
                prefixes.clear_expected(running_requests.pop(rng.randrange(len(running_requests)))[1])
            case _ if rng.random() < 0.1:
                prefixes.update(worker, [BlocksCleared()])
                caches[worker].clear()
        if not running_requests:
            workers, digests = rng.randrange(1 << num_workers), rng.choice(prompts)
            assert prefixes.depths(digests, workers) == search_depths(caches, digests, workers)
    for _, recorded_digests in running_requests:
        prefixes.clear_expected(recorded_digests)
    assert prefixes._expected_workers == {}
    assert prefixes.depths([], 1) == {}


def test_expect_returns_only_digests_that_are_not_stored() -> None:
    prefixes, digests = PrefixMap(), [b"%d" % number for number in range(100)]
    prefixes.update(1, [BlocksStored(digests[:10], None, [])])
    recorded_digests = prefixes.expect(1, digests)
    assert recorded_digests == digests[10:]
    assert prefixes.depths(digests, 0b11) == {1: 100}
    later_digests = prefixes.expect(1, digests)
    prefixes.clear_expected(recorded_digests)
    assert prefixes.depths(digests, 0b11) == {1: 100}
    prefixes.clear_expected(later_digests)
    assert prefixes.depths(digests, 0b11) == {1: 10}
