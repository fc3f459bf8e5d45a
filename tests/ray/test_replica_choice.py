"""The choice of the replica for a request, with reports and without Ray."""

from __future__ import annotations

from support.prefix_caches import CACHING_INFO, make_stored_event
from support.workers import request

from penstock.pipelines.core.cache_events import BlocksCleared, CacheEvent
from penstock.ray.cache_log import CacheChanges
from penstock.ray.messages import ReplicaReport
from penstock.ray.replica_choice import ReplicaChoice
from penstock.worker.messages import WorkerStats
from penstock.worker.routing import prompt_digests

LONG_PROMPT = "x" * 600


def report(choice: ReplicaChoice, **events: list[CacheEvent]) -> None:
    """Let the replicas that are named report these events."""
    choice.update(
        {
            name: ReplicaReport(name, CACHING_INFO, WorkerStats(), cache=CacheChanges(len(found), found))
            for name, found in events.items()
        }
    )


def choose_replica(
    choice: ReplicaChoice, prompt: str = "Hi", lost: tuple[str, ...] = (), **fields: object
) -> str:
    """Return the replica of a request that ends at once."""
    assignment = choice.assign(request("", prompt, **fields), lost)
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
    assert [one.name for one in running if one is not None] == ["a", "b", "a"]
    for one in running:
        assert one is not None
        choice.end(one)
    assert choose_replica(choice) == "a"


def test_a_prompt_counts_as_load_until_its_first_result() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[])
    computing = choice.assign(request("", LONG_PROMPT))
    running = choice.assign(request(""))
    assert computing is not None
    assert running is not None
    assert (computing.name, running.name) == ("a", "b")
    choice.start(running)
    assert choose_replica(choice) == "b"
    choice.start(computing)
    assert choose_replica(choice) == "a"


def test_with_several_ingresses_each_request_counts_as_several() -> None:
    """Each of eight ingress processes knows an eighth of the requests."""
    for num_ingresses, expected in {1: "b", 8: "a"}.items():
        choice = ReplicaChoice(num_ingresses)
        report(choice, a=[], b=[make_stored_event(LONG_PROMPT)])
        assert choice.assign(request("", LONG_PROMPT)) is not None
        assert choose_replica(choice, LONG_PROMPT) == expected


def test_expected_blocks_of_an_ended_request_count_until_its_replica_has_reported() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[])
    assert choice.assign(request("busy", "z" * 8)) is not None  # at a
    assert choose_replica(choice, LONG_PROMPT) == "b"
    assert choose_replica(choice, LONG_PROMPT) == "b"
    report(choice, a=[], b=[])  # it may have left before the request ended
    assert choice.assign(request("busier", "z" * 8)) is not None  # at b, a has the lower number
    assert choose_replica(choice, LONG_PROMPT) == "b"
    report(choice, a=[], b=[])
    report(choice, a=[], b=[])
    assert choice._prefixes._expected.keys() == set(prompt_digests(request("", "z" * 8), CACHING_INFO))
    assert choose_replica(choice, LONG_PROMPT) == "a"


def test_a_session_stays_with_its_replica() -> None:
    choice = ReplicaChoice()
    report(choice, a=[], b=[])
    busy = choice.assign(request("busy"))
    assert busy is not None
    assert choose_replica(choice, session_id="s") == "b"
    choice.end(busy)
    assert choose_replica(choice, session_id="s") == "b"
    report(choice, a=[])
    assert choose_replica(choice, session_id="s") == "a"


def test_replicas_are_removed_and_added() -> None:
    choice = ReplicaChoice()
    assert choose_replica(choice) == ""
    report(choice, a=[], b=[make_stored_event(LONG_PROMPT)])
    assert choose_replica(choice, "y" * 600, lost=("b",)) == "a"
    assert choose_replica(choice, LONG_PROMPT, lost=("a", "b")) == ""
    running = choice.assign(request("", LONG_PROMPT))
    assert running is not None
    assert running.name == "b"
    report(choice, a=[], c=[])  # c gets the number of b, and neither its blocks nor its requests
    assert choice._prefixes.num_blocks == 0
    choice.end(running)
    assert choice._loads.num_requests == choice._loads.costs == [0, 0]
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
    later = choice.assign(request(""), lost=("b",))
    for assignment in (*running, later):
        assert assignment is not None
        choice.start(assignment)
        choice.end(assignment)
    assert choice._loads.num_requests == choice._loads.costs == [0, 0]
