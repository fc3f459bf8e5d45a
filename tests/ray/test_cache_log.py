"""The log of a replica's prefix cache, and readers that follow it."""

from __future__ import annotations

import random

from penstock.pipelines.core.cache_events import BlocksCleared, BlocksRemoved, BlocksStored
from penstock.ray import cache_log
from penstock.ray.cache_log import CacheLog
from penstock.worker.prefix_map import PrefixMap


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def stored(*numbers: int) -> BlocksStored:
    return BlocksStored([block(number) for number in numbers], block(0), [7] * len(numbers), "tone")


def removed(*numbers: int) -> BlocksRemoved:
    return BlocksRemoved([block(number) for number in numbers])


def test_a_reader_gets_each_event_once_and_without_tokens() -> None:
    log = CacheLog()
    log.add([stored(1, 2)])
    first = log.since(0)
    assert first.events == [BlocksStored([block(1), block(2)], None, [])]
    log.add([removed(2), BlocksCleared()])
    second = log.since(first.position)
    assert second.events == [removed(2), BlocksCleared()]
    assert log.since(second.position).events == []


def test_a_reader_that_has_fallen_behind_gets_all_blocks() -> None:
    log = CacheLog()
    for number in range(5000):
        log.add([stored(number + 3), removed(number)])
    changes = log.since(10)
    assert changes.events == [BlocksCleared(), stored_only(5000, 5001, 5002)]
    assert log.since(changes.position).events == []
    assert sum(len(one.digests) for one in log._events) <= cache_log._MIN_LOGGED  # type: ignore[union-attr]


def stored_only(*numbers: int) -> BlocksStored:
    return BlocksStored([block(number) for number in numbers], None, [])


def test_a_reader_of_another_log_gets_all_blocks() -> None:
    """A position above the end belongs to a log that was lost."""
    log = CacheLog()
    log.add([stored(1)])
    assert log.since(99).events == [BlocksCleared(), stored_only(1)]


def test_readers_at_any_pace_know_the_cache() -> None:
    draws, log, cached = random.Random(1), CacheLog(), set[int]()
    readers = [(PrefixMap(), period) for period in (1, 7, 900)]
    positions = [0] * len(readers)
    for step in range(3000):
        chosen = draws.randrange(400)
        if draws.random() < 0.001:
            cached.clear()
            log.add([BlocksCleared()])
        elif chosen in cached:
            cached.remove(chosen)
            log.add([removed(chosen)])
        else:
            cached.add(chosen)
            log.add([stored(chosen)])
        for number, (found, period) in enumerate(readers):
            if step % period == 0:
                changes = log.since(positions[number])
                found.update(0, changes.events)
                positions[number] = changes.position
                assert found.num_blocks == len(cached)
                assert all(found.depths([block(one)], 1) == {0: 1} for one in cached)


def test_a_block_is_cached_while_a_worker_has_it() -> None:
    log = CacheLog()
    log.add([stored(1, 2)], worker=0)
    log.add([stored(2, 3)], worker=1)
    position = log.since(0).position
    log.add([removed(1, 2)], worker=0)
    assert log.since(position).events == [removed(1)]
    log.add([stored(1)], worker=0)
    position = log.since(0).position
    log.add([BlocksCleared()], worker=1)
    assert log.since(position).events == [removed(2, 3)]
    log.add([BlocksCleared()], worker=0)
    assert log.since(position).events == [removed(2, 3), BlocksCleared()]
