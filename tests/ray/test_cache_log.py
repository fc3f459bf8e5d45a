"""The log of prefix cache events of a replica, and its readers."""

from __future__ import annotations

import random

from penstock.pipelines.core.cache_events import BlocksCleared, BlocksRemoved, BlocksStored
from penstock.ray import cache_log
from penstock.ray.cache_log import CacheLog
from penstock.worker.prefix_map import PrefixMap


def make_digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def make_stored_event(*numbers: int) -> BlocksStored:
    return BlocksStored(
        [make_digest(number) for number in numbers], make_digest(0), [7] * len(numbers), "tone"
    )


def make_removed_event(*numbers: int) -> BlocksRemoved:
    return BlocksRemoved([make_digest(number) for number in numbers])


def test_a_reader_gets_each_event_once_without_token_ids() -> None:
    log = CacheLog()
    log.add([make_stored_event(1, 2)])
    first_changes = log.since(0)
    assert first_changes.events == [BlocksStored([make_digest(1), make_digest(2)], None, [])]
    log.add([make_removed_event(2), BlocksCleared()])
    second_changes = log.since(first_changes.position)
    assert second_changes.events == [make_removed_event(2), BlocksCleared()]
    assert log.since(second_changes.position).events == []


def test_a_reader_at_a_dropped_position_gets_all_blocks() -> None:
    log = CacheLog()
    for number in range(5000):
        log.add([make_stored_event(number + 3), make_removed_event(number)])
    changes = log.since(10)
    assert changes.events == [BlocksCleared(), make_stored_event_without_tokens(5000, 5001, 5002)]
    assert log.since(changes.position).events == []
    assert sum(len(event.digests) for event in log._events) <= cache_log._MIN_CAPACITY  # type: ignore[union-attr]


def make_stored_event_without_tokens(*numbers: int) -> BlocksStored:
    return BlocksStored([make_digest(number) for number in numbers], None, [])


def test_a_reader_of_another_log_gets_all_blocks() -> None:
    """A position after the end belongs to the log of an earlier process."""
    log = CacheLog()
    log.add([make_stored_event(1)])
    assert log.since(99).events == [BlocksCleared(), make_stored_event_without_tokens(1)]


def test_changes_read_at_any_interval_give_the_cached_blocks() -> None:
    rng, log, cached_blocks = random.Random(1), CacheLog(), set[int]()
    readers = [(PrefixMap(), period) for period in (1, 7, 900)]
    positions = [0] * len(readers)
    for step in range(3000):
        block = rng.randrange(400)
        if rng.random() < 0.001:
            cached_blocks.clear()
            log.add([BlocksCleared()])
        elif block in cached_blocks:
            cached_blocks.remove(block)
            log.add([make_removed_event(block)])
        else:
            cached_blocks.add(block)
            log.add([make_stored_event(block)])
        for number, (prefix_map, period) in enumerate(readers):
            if step % period == 0:
                changes = log.since(positions[number])
                prefix_map.update(0, changes.events)
                positions[number] = changes.position
                assert prefix_map.num_blocks == len(cached_blocks)
                assert all(prefix_map.depths([make_digest(block)], 1) == {0: 1} for block in cached_blocks)


def test_a_block_is_cached_while_a_worker_has_it() -> None:
    log = CacheLog()
    log.add([make_stored_event(1, 2)], worker=0)
    log.add([make_stored_event(2, 3)], worker=1)
    position = log.since(0).position
    log.add([make_removed_event(1, 2)], worker=0)
    assert log.since(position).events == [make_removed_event(1)]
    log.add([make_stored_event(1)], worker=0)
    position = log.since(0).position
    log.add([BlocksCleared()], worker=1)
    assert log.since(position).events == [make_removed_event(2, 3)]
    log.add([BlocksCleared()], worker=0)
    assert log.since(position).events == [make_removed_event(2, 3), BlocksCleared()]
