"""The choice of the replica for a request, with reports and without Ray."""

from __future__ import annotations

from support.prefix_caches import CACHING_INFO, make_stored_event
from support.workers import make_request

from penstock.pipelines.core.cache_events import BlocksCleared, CacheEvent
from penstock.ray.cache_log import CacheChanges
from penstock.ray.messages import ReplicaReport
from penstock.ray.replica_choice import ReplicaChoice
from penstock.worker.messages import WorkerStats
from penstock.worker.routing import prompt_digests

LONG_PROMPT = "x" * 600


def report_events(choice: ReplicaChoice, **events: list[CacheEvent]) -> None:
    """Report these events for the named replicas."""
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
    """Return the replica that is chosen for a request, or "" if there is none. The request ends at once."""
    assignment = choice.assign(make_request("", prompt, **fields), lost_replicas)
    if assignment is None:
        return ""
    choice.end(assignment)
    return assignment.name


def test_a_request_goes_to_the_replica_that_has_its_prefix() -> None:
    choice = ReplicaChoice()
    report_events(choice, a=[], b=[make_stored_event(LONG_PROMPT)])
    assert choose_replica(choice, LONG_PROMPT) == "b"
    assert choose_replica(choice, "y" * 600) == "a"
    assert choice.positions == {"a": 0, "b": 1}
    report_events(choice, a=[], b=[BlocksCleared()])
    assert choose_replica(choice, LONG_PROMPT) == "a"


def test_load_is_shared_and_ends_with_the_request() -> None:
    choice = ReplicaChoice()
    report_events(choice, a=[], b=[])
    running_assignments = [choice.assign(make_request(name)) for name in "xyz"]
    assert [assignment.name for assignment in running_assignments if assignment is not None] == [
        "a",
        "b",
        "a",
    ]
    for assignment in running_assignments:
        assert assignment is not None
        choice.end(assignment)
    assert choose_replica(choice) == "a"


def test_a_prompt_counts_as_load_until_its_first_result() -> None:
    choice = ReplicaChoice()
    report_events(choice, a=[], b=[])
    prompt_assignment = choice.assign(make_request("", LONG_PROMPT))
    running_assignment = choice.assign(make_request(""))
    assert prompt_assignment is not None
    assert running_assignment is not None
    assert (prompt_assignment.name, running_assignment.name) == ("a", "b")
    choice.start(running_assignment)
    assert choose_replica(choice) == "b"
    choice.start(prompt_assignment)
    assert choose_replica(choice) == "a"


def test_with_several_ingresses_the_load_of_a_request_is_multiplied() -> None:
    """Each of eight ingress processes sees one eighth of the requests, so it counts each request 8 times."""
    for num_ingresses, expected in {1: "b", 8: "a"}.items():
        choice = ReplicaChoice(num_ingresses)
        report_events(choice, a=[], b=[make_stored_event(LONG_PROMPT)])
        assert choice.assign(make_request("", LONG_PROMPT)) is not None
        assert choose_replica(choice, LONG_PROMPT) == expected


def test_expected_blocks_of_an_ended_request_count_until_its_replica_has_reported() -> None:
    choice = ReplicaChoice()
    report_events(choice, a=[], b=[])
    assert choice.assign(make_request("busy", "z" * 8)) is not None  # assigned to a
    assert choose_replica(choice, LONG_PROMPT) == "b"
    assert choose_replica(choice, LONG_PROMPT) == "b"
    report_events(choice, a=[], b=[])  # this report may have been made before the request ended
    # Both replicas have load. The request goes to b, whose number is higher, because b expects its blocks.
    assert choice.assign(make_request("busier", "z" * 8)) is not None
    assert choose_replica(choice, LONG_PROMPT) == "b"
    report_events(choice, a=[], b=[])
    report_events(choice, a=[], b=[])
    assert choice._prefixes._expected_workers.keys() == set(
        prompt_digests(make_request("", "z" * 8), CACHING_INFO)
    )
    assert choose_replica(choice, LONG_PROMPT) == "a"


def test_a_session_stays_with_its_replica() -> None:
    choice = ReplicaChoice()
    report_events(choice, a=[], b=[])
    busy_assignment = choice.assign(make_request("busy"))
    assert busy_assignment is not None
    assert choose_replica(choice, session_id="s") == "b"
    choice.end(busy_assignment)
    assert choose_replica(choice, session_id="s") == "b"
    report_events(choice, a=[])
    assert choose_replica(choice, session_id="s") == "a"


def test_replicas_are_removed_and_added() -> None:
    choice = ReplicaChoice()
    assert choose_replica(choice) == ""
    report_events(choice, a=[], b=[make_stored_event(LONG_PROMPT)])
    assert choose_replica(choice, "y" * 600, lost_replicas=("b",)) == "a"
    assert choose_replica(choice, LONG_PROMPT, lost_replicas=("a", "b")) == ""
    running_assignment = choice.assign(make_request("", LONG_PROMPT))
    assert running_assignment is not None
    assert running_assignment.name == "b"
    report_events(choice, a=[], c=[])  # c gets the number of b, but not its blocks and requests
    assert choice._prefixes.num_blocks == 0
    choice.end(running_assignment)
    assert choice._loads.num_requests == choice._loads.costs == [0, 0]
    assert choice.positions == {"a": 0, "c": 0}
    report_events(choice, a=[], c=[])
    assert not choice._prefixes._expected_workers
    report_events(choice)
    assert choose_replica(choice) == ""


def test_a_replica_that_is_removed_and_added_again_has_no_load() -> None:
    choice = ReplicaChoice()
    report_events(choice, a=[], b=[])
    running_assignments = [choice.assign(make_request(""), lost_replicas=("b",)) for _ in range(3)]
    report_events(choice, b=[])
    report_events(choice, a=[], b=[])
    later_assignment = choice.assign(make_request(""), lost_replicas=("b",))
    for assignment in (*running_assignments, later_assignment):
        assert assignment is not None
        choice.start(assignment)
        choice.end(assignment)
    assert choice._loads.num_requests == choice._loads.costs == [0, 0]
