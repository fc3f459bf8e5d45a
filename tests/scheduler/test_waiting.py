"""The queue of waiting contexts: order, readiness, removal, clients."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.scheduler.waiting import WaitingQueue


@dataclass(frozen=True)
class Waiter:
    request_id: str
    key: tuple[int, int]
    client_id: str = ""


def queue_of(names: str, scan_limit: int = 4) -> WaitingQueue[Waiter]:
    queue: WaitingQueue[Waiter] = WaitingQueue(scan_limit)
    for place, name in enumerate(names):
        queue.push(Waiter(name, (0, place)))
    queue.recheck(lambda entry: True)
    return queue


def served(queue: WaitingQueue[Waiter], ready: str) -> str:
    """Serve all ready entries in one step and return them."""

    def is_ready(entry: Waiter) -> bool:
        return entry.request_id in ready

    queue.recheck(is_ready)
    names = ""
    while (entry := queue.first_ready(is_ready)) is not None:
        queue.remove(entry.request_id)
        names += entry.request_id
    return names


def test_the_smallest_key_is_served_first() -> None:
    queue = queue_of("bc")
    queue.push(Waiter("a", (-1, 2)))
    assert served(queue, "abc") == "abc"
    assert len(queue) == 0


def test_iterating_removes_no_entry() -> None:
    queue = queue_of("a")
    for _ in range(2):
        entry = queue.first_ready(lambda entry: True)
        assert entry is not None
        assert entry.request_id == "a"
    assert "a" in queue


def test_an_entry_that_is_not_ready_is_overtaken_and_keeps_its_position() -> None:
    queue = queue_of("abcd")
    assert served(queue, "bd") == "bd"
    queue.push(Waiter("e", (0, 9)))
    assert served(queue, "ace") == "ace"


def test_removed_entries_are_skipped_at_any_position() -> None:
    queue = queue_of("abcd")
    assert served(queue, "c") == "c"
    removed = queue.remove("a")  # it was not ready and is kept apart
    assert removed is not None
    assert queue.remove("a") is None
    assert served(queue, "abd") == "bd"


def test_an_entry_can_be_added_again() -> None:
    queue = queue_of("ab")
    first = queue.remove("a")
    assert first is not None
    queue.push(first)
    assert served(queue, "ab") == "ab"


def test_a_step_checks_few_unready_entries_and_reaches_all_in_turn() -> None:
    queue = queue_of("abcdefgh", scan_limit=2)
    looks = 0

    def is_ready(entry: Waiter) -> bool:
        nonlocal looks
        looks += 1
        return entry.request_id == "h"

    steps = 0
    while (entry := queue.first_ready(is_ready)) is None:
        steps += 1
        assert looks <= 4 * steps
        queue.recheck(is_ready)
    assert entry.request_id == "h"
    assert steps == 3


def test_clients_are_served_by_rank_in_their_own_order() -> None:
    ranks = {"x": (1,), "y": (0,)}
    queue: WaitingQueue[Waiter] = WaitingQueue(4, ranks.__getitem__)
    for place, name in enumerate("abcd"):
        queue.push(Waiter(name, (0, place), "x" if name in "ab" else "y"))
    order = ""
    while (entry := queue.first_ready(lambda entry: True)) is not None:
        order += entry.request_id
        queue.remove(entry.request_id)
        ranks[entry.client_id] = (ranks[entry.client_id][0] + 1,)
    assert order == "cadb"


def test_a_client_whose_rank_falls_moves_forward() -> None:
    ranks = {"x": (2,), "y": (1,)}
    queue: WaitingQueue[Waiter] = WaitingQueue(4, ranks.__getitem__)
    queue.push(Waiter("a", (0, 0), "x"))
    queue.push(Waiter("b", (0, 1), "y"))
    ranks["x"] = (0,)
    queue.refresh("x")
    entry = queue.first_ready(lambda entry: True)
    assert entry is not None
    assert entry.request_id == "a"


def test_priority_comes_before_rank() -> None:
    ranks = {"x": (0,), "y": (9,)}
    queue: WaitingQueue[Waiter] = WaitingQueue(4, ranks.__getitem__)
    queue.push(Waiter("a", (0, 0), "x"))
    queue.push(Waiter("b", (-1, 1), "y"))
    assert queue.first_ready(lambda entry: True) == Waiter("b", (-1, 1), "y")


def test_the_heap_of_clients_stays_small() -> None:
    queue: WaitingQueue[Waiter] = WaitingQueue(4, lambda client_id: (0,))
    for place in range(5000):
        queue.push(Waiter(f"{place}", (0, place), f"client {place % 10}"))
    assert len(queue._heap) <= 2 * 10 + 64 + 1
    for place in range(5000):
        queue.remove(f"{place}")
    assert queue.first_ready(lambda entry: True) is None
    assert not queue._lanes


def test_a_changing_rank_leaves_few_items_behind() -> None:
    ranks = {"x": 0}
    queue: WaitingQueue[Waiter] = WaitingQueue(4, lambda client_id: (ranks[client_id],))
    for place in range(200):
        queue.push(Waiter(f"{place}", (0, place), "x"))
    for place in range(200):
        entry = queue.first_ready(lambda entry: True)
        assert entry == Waiter(f"{place}", (0, place), "x")
        assert len(queue._heap) <= 2
        queue.remove(entry.request_id)
        ranks["x"] = place % 3  # a slot is taken, or all are freed
        queue.refresh("x")
    assert queue.first_ready(lambda entry: True) is None
    assert not queue._queued
