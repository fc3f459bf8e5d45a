"""The choice of the replica for a request, with reports and without Ray."""

from __future__ import annotations

import msgspec
from support.engines import INFO
from support.workers import request

from penstock.pipelines.core.cache_events import BlocksCleared, BlocksStored, CacheEvent
from penstock.ray.cache_log import CacheChanges
from penstock.ray.messages import ReplicaReport
from penstock.ray.replica_choice import ReplicaChoice
from penstock.worker.messages import WorkerStats
from penstock.worker.routing import digests_of

CACHING = msgspec.structs.replace(INFO, block_size=4, prefix_limits=[], max_batch_size=3)
LONG = "x" * 600


def stored(prompt: str) -> BlocksStored:
    return BlocksStored(digests_of(request("", prompt), CACHING), None, [])


def report(choice: ReplicaChoice, **events: list[CacheEvent]) -> None:
    """Let the replicas that are named report these events."""
    choice.update(
        {
            name: ReplicaReport(name, CACHING, WorkerStats(), cache=CacheChanges(len(found), found))
            for name, found in events.items()
        }
    )


def chosen(choice: ReplicaChoice, prompt: str = "Hi", lost: tuple[str, ...] = (), **fields: object) -> str:
    """Return the replica of a request that ends at once."""
    assignment = choice.assign(request("", prompt, **fields), lost)
    if assignment is None:
        return ""
    choice.end(assignment)
    return assignment.name


def test_a_request_goes_to_the_replica_that_has_its_prefix() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[stored(LONG)])
    assert chosen(choice, LONG) == "b"
    assert chosen(choice, "y" * 600) == "a"
    assert choice.positions == {"a": 0, "b": 1}
    report(choice, a=[], b=[BlocksCleared()])
    assert chosen(choice, LONG) == "a"


def test_load_is_shared_and_ends_with_the_request() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[])
    running = [choice.assign(request(name)) for name in "xyz"]
    assert [one.name for one in running if one is not None] == ["a", "b", "a"]
    for one in running:
        assert one is not None
        choice.end(one)
    assert chosen(choice) == "a"


def test_several_ingresses_weigh_their_own_requests_more() -> None:
    """Each of three processes knows a third of the requests."""
    for num_ingresses, expected in {1: "b", 3: "a"}.items():
        choice = ReplicaChoice(num_ingresses)
        report(choice, a=[], b=[stored(LONG)])
        assert choice.assign(request("", LONG)) is not None
        assert chosen(choice, LONG) == expected


def test_the_blocks_of_an_ended_request_count_until_its_replica_has_reported() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[])
    assert choice.assign(request("busy", "z" * 8)) is not None  # at a
    assert chosen(choice, LONG) == "b"
    assert chosen(choice, LONG) == "b"
    report(choice, a=[], b=[])  # it may have left before the request ended
    assert choice.assign(request("busier", "z" * 8)) is not None  # at b, a has the lower number
    assert chosen(choice, LONG) == "b"
    report(choice, a=[], b=[])
    report(choice, a=[], b=[])
    assert choice._prefixes._expected.keys() == set(digests_of(request("", "z" * 8), CACHING))
    assert chosen(choice, LONG) == "a"


def test_a_session_stays_with_its_replica() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[])
    busy = choice.assign(request("busy"))
    assert busy is not None
    assert chosen(choice, session_id="s") == "b"
    choice.end(busy)
    assert chosen(choice, session_id="s") == "b"
    report(choice, a=[])
    assert chosen(choice, session_id="s") == "a"


def test_replicas_come_and_go() -> None:
    choice = ReplicaChoice()
    assert chosen(choice) == ""
    report(choice, a=[], b=[stored(LONG)])
    assert chosen(choice, LONG, lost=("b",)) == "a"
    assert chosen(choice, LONG, lost=("a", "b")) == ""
    running = choice.assign(request("", LONG))
    assert running is not None
    assert running.name == "b"
    report(choice, a=[], c=[])  # c gets the number of b, and neither its blocks nor its requests
    assert choice._prefixes.num_blocks == 0
    choice.end(running)
    assert choice._loads == [0, 0]
    assert choice.positions == {"a": 0, "c": 0}
    report(choice, a=[], c=[])
    assert not choice._prefixes._expected
    report(choice)
    assert chosen(choice) == ""


def test_a_replica_that_misses_a_report_comes_back_without_load() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[])
    running = [choice.assign(request(""), lost=("b",)) for _ in range(3)]
    report(choice, b=[])
    report(choice, a=[], b=[])
    later = choice.assign(request(""), lost=("b",))
    for assignment in (*running, later):
        assert assignment is not None
        choice.end(assignment)
    assert choice._loads == [0, 0]
