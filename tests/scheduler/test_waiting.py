"""The queue of waiting contexts: order, readiness, removal, clients."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.scheduler.waiting import WaitingQueue


@dataclass(frozen=True)
class Entry:
    request_id: str
    sort_key: tuple[int, int]
    client_id: str = ""


def make_queue(names: str, scan_limit: int = 4) -> WaitingQueue[Entry]:
    queue: WaitingQueue[Entry] = WaitingQueue(scan_limit)
    for index, name in enumerate(names):
        queue.push(Entry(name, (0, index)))
    queue.recheck(lambda entry: True)
    return queue


def serve_ready(queue: WaitingQueue[Entry], ready_names: str) -> str:
    """Remove all ready entries in one step and return their names."""

    def is_ready(entry: Entry) -> bool:
        return entry.request_id in ready_names

    queue.recheck(is_ready)
    names = ""
    while (entry := queue.first_ready(is_ready)) is not None:
        queue.remove(entry.request_id)
        names += entry.request_id
    return names


def test_the_entry_with_the_smallest_sort_key_is_served_first() -> None:
    queue = make_queue("bc")
    queue.push(Entry("a", (-1, 2)))
    assert serve_ready(queue, "abc") == "abc"
    assert len(queue) == 0


def test_first_ready_removes_no_entry() -> None:
    queue = make_queue("a")
    for _ in range(2):
        entry = queue.first_ready(lambda entry: True)
        assert entry is not None
        assert entry.request_id == "a"
    assert "a" in queue


def test_an_unready_entry_is_overtaken_and_keeps_its_position() -> None:
    queue = make_queue("abcd")
    assert serve_ready(queue, "bd") == "bd"
    queue.push(Entry("e", (0, 9)))
    assert serve_ready(queue, "ace") == "ace"


def test_removed_entries_are_skipped_at_any_position() -> None:
    queue = make_queue("abcd")
    assert serve_ready(queue, "c") == "c"
    removed_entry = queue.remove("a")  # a is not ready, so it is in the list of unready entries
    assert removed_entry is not None
    assert queue.remove("a") is None
    assert serve_ready(queue, "abd") == "bd"


def test_an_entry_can_be_added_again() -> None:
    queue = make_queue("ab")
    entry = queue.remove("a")
    assert entry is not None
    queue.push(entry)
    assert serve_ready(queue, "ab") == "ab"


def test_a_step_checks_few_unready_entries_and_reaches_all_in_turn() -> None:
    queue = make_queue("abcdefgh", scan_limit=2)
    num_checks = 0

    def is_ready(entry: Entry) -> bool:
        nonlocal num_checks
        num_checks += 1
        return entry.request_id == "h"

    num_steps = 0
    while (entry := queue.first_ready(is_ready)) is None:
        num_steps += 1
        assert num_checks <= 4 * num_steps
        queue.recheck(is_ready)
    assert entry.request_id == "h"
    assert num_steps == 3


def test_clients_are_served_by_rank_and_their_entries_by_sort_key() -> None:
    ranks = {"x": (1,), "y": (0,)}
    queue: WaitingQueue[Entry] = WaitingQueue(4, ranks.__getitem__)
    for index, name in enumerate("abcd"):
        queue.push(Entry(name, (0, index), "x" if name in "ab" else "y"))
    order = ""
    while (entry := queue.first_ready(lambda entry: True)) is not None:
        order += entry.request_id
        queue.remove(entry.request_id)
        ranks[entry.client_id] = (ranks[entry.client_id][0] + 1,)
    assert order == "cadb"


def test_a_client_whose_rank_decreases_moves_forward() -> None:
    ranks = {"x": (2,), "y": (1,)}
    queue: WaitingQueue[Entry] = WaitingQueue(4, ranks.__getitem__)
    queue.push(Entry("a", (0, 0), "x"))
    queue.push(Entry("b", (0, 1), "y"))
    ranks["x"] = (0,)
    queue.refresh("x")
    entry = queue.first_ready(lambda entry: True)
    assert entry is not None
    assert entry.request_id == "a"


def test_outdated_keys_of_a_client_do_not_move_it_before_other_clients() -> None:
    ranks = {"x": (4, 1), "y": (3, 5)}
    queue: WaitingQueue[Entry] = WaitingQueue(4, ranks.__getitem__)
    queue.push(Entry("a", (0, 0), "x"))
    for rank in ((3, 1), (2, 1)):  # each decrease adds a key
        ranks["x"] = rank
        queue.refresh("x")
    queue.push(Entry("b", (0, 1), "y"))
    queue.push(Entry("c", (0, 2), "x"))
    queue.remove("a")
    ranks["x"] = (3, 6)
    assert queue.first_ready(lambda entry: True) == Entry("b", (0, 1), "y")


def test_priority_comes_before_rank() -> None:
    ranks = {"x": (0,), "y": (9,)}
    queue: WaitingQueue[Entry] = WaitingQueue(4, ranks.__getitem__)
    queue.push(Entry("a", (0, 0), "x"))
    queue.push(Entry("b", (-1, 1), "y"))
    assert queue.first_ready(lambda entry: True) == Entry("b", (-1, 1), "y")


def test_the_heap_size_depends_on_clients_and_not_on_entries() -> None:
    queue: WaitingQueue[Entry] = WaitingQueue(4, lambda client_id: (0,))
    for index in range(5000):
        queue.push(Entry(f"{index}", (0, index), f"client {index % 10}"))
    assert len(queue._heap) <= 2 * 10 + 64 + 1
    for index in range(5000):
        queue.remove(f"{index}")
    assert queue.first_ready(lambda entry: True) is None
    assert not queue._lanes


def test_rank_changes_leave_at_most_two_keys_in_the_heap() -> None:
    ranks = {"x": 0}
    queue: WaitingQueue[Entry] = WaitingQueue(4, lambda client_id: (ranks[client_id],))
    for index in range(200):
        queue.push(Entry(f"{index}", (0, index), "x"))
    for index in range(200):
        entry = queue.first_ready(lambda entry: True)
        assert entry == Entry(f"{index}", (0, index), "x")
        assert len(queue._heap) <= 2
        queue.remove(entry.request_id)
        ranks["x"] = index % 3  # ranks change when a slot is taken or freed
        queue.refresh("x")
    assert queue.first_ready(lambda entry: True) is None
    assert not queue._newest_keys
