"""The choice of the replica for a request, from reports of replicas. Needs no Ray."""

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

CACHING_INFO = msgspec.structs.replace(INFO, block_size=4, prefix_limits=[], max_batch_size=3)
LONG_PROMPT = "x" * 600


def make_stored_event(prompt: str) -> BlocksStored:
    return BlocksStored(digests_of(request("", prompt), CACHING_INFO), None, [])


def report(choice: ReplicaChoice, **events: list[CacheEvent]) -> None:
    """Update the choice with a report of each named replica that has these events."""
    choice.update(
        {
            name: ReplicaReport(
                name, CACHING_INFO, WorkerStats(), cache=CacheChanges(len(replica_events), replica_events)
            )
            for name, replica_events in events.items()
        }
    )


def choose_replica(
    choice: ReplicaChoice, prompt: str = "Hi", lost_replicas: tuple[str, ...] = (), **fields: object
) -> str:
    """Return the replica that is chosen for a request. The request ends at once."""
    assignment = choice.assign(request("", prompt, **fields), lost_replicas)
    if assignment is None:
        return ""
    choice.end(assignment)
    return assignment.name


def test_a_request_goes_to_the_replica_that_has_its_prefix() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[make_stored_event(LONG_PROMPT)])
    assert choose_replica(choice, LONG_PROMPT) == "b"
    assert choose_replica(choice, "y" * 600) == "a"
    assert choice.positions == {"a": 0, "b": 1}
    report(choice, a=[], b=[BlocksCleared()])
    assert choose_replica(choice, LONG_PROMPT) == "a"


def test_load_is_shared_and_ends_with_the_request() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[])
    running = [choice.assign(request(name)) for name in "xyz"]
    assert [assignment.name for assignment in running if assignment is not None] == ["a", "b", "a"]
    for assignment in running:
        assert assignment is not None
        choice.end(assignment)
    assert choose_replica(choice) == "a"


def test_with_several_ingresses_each_request_counts_as_several() -> None:
    """Each of three ingress processes knows a third of the requests."""
    for num_ingresses, expected in {1: "b", 3: "a"}.items():
        choice = ReplicaChoice(num_ingresses)
        report(choice, a=[], b=[make_stored_event(LONG_PROMPT)])
        assert choice.assign(request("", LONG_PROMPT)) is not None
        assert choose_replica(choice, LONG_PROMPT) == expected


def test_expected_blocks_of_an_ended_request_count_until_its_replica_has_reported() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[])
    assert choice.assign(request("busy", "z" * 8)) is not None  # runs on a
    assert choose_replica(choice, LONG_PROMPT) == "b"
    assert choose_replica(choice, LONG_PROMPT) == "b"
    report(choice, a=[], b=[])  # the report may have been sent before the request ended
    assert choice.assign(request("busier", "z" * 8)) is not None  # runs on b: now the loads are equal
    assert choose_replica(choice, LONG_PROMPT) == "b"
    report(choice, a=[], b=[])
    report(choice, a=[], b=[])
    assert choice._prefixes._expected.keys() == set(digests_of(request("", "z" * 8), CACHING_INFO))
    assert choose_replica(choice, LONG_PROMPT) == "a"


def test_a_session_stays_with_its_replica() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[])
    busy_replica = choice.assign(request("busy"))
    assert busy_replica is not None
    assert choose_replica(choice, session_id="s") == "b"
    choice.end(busy_replica)
    assert choose_replica(choice, session_id="s") == "b"
    report(choice, a=[])
    assert choose_replica(choice, session_id="s") == "a"


def test_replicas_are_removed_and_added() -> None:
    choice = ReplicaChoice()
    assert choose_replica(choice) == ""
    report(choice, a=[], b=[make_stored_event(LONG_PROMPT)])
    assert choose_replica(choice, LONG_PROMPT, lost_replicas=("b",)) == "a"
    assert choose_replica(choice, LONG_PROMPT, lost_replicas=("a", "b")) == ""
    running = choice.assign(request("", LONG_PROMPT))
    assert running is not None
    assert running.name == "b"
    report(choice, a=[], c=[])  # c gets the number of b, but not its blocks and requests
    assert choice._prefixes.num_blocks == 0
    choice.end(running)
    assert choice._loads == [0, 0]
    assert choice.positions == {"a": 0, "c": 0}
    report(choice, a=[], c=[])
    assert not choice._prefixes._expected
    report(choice)
    assert choose_replica(choice) == ""


def test_a_replica_without_a_report_returns_without_load() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[])
    running = [choice.assign(request(""), lost=("b",)) for _ in range(3)]
    report(choice, b=[])
    report(choice, a=[], b=[])
    last = choice.assign(request(""), lost=("b",))
    for assignment in (*running, last):
        assert assignment is not None
        choice.end(assignment)
    assert choice._loads == [0, 0]
