"""`ReplicaChoice`: chooses a replica for each request, with the routing policy for several local workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.pipelines.core import RequestContext
from penstock.pipelines.core.cache_events import BlocksCleared
from penstock.ray.messages import ReplicaReport
from penstock.worker.messages import WorkerInfo
from penstock.worker.prefix_map import PrefixMap
from penstock.worker.routing import PrefixAware, RequestLoad, WorkerLoads, num_uncached_tokens, prompt_digests


@dataclass(slots=True, eq=False)
class _Replica:
    """The state of a replica as seen by one HTTP process."""

    name: str
    position: int = 0
    """The position up to which the replica's `CacheLog` was read."""
    blocks_since_report: list[Sequence[bytes]] = field(default_factory=list)
    """Digests of the expected blocks of each request that has ended since the last report."""
    blocks_before_report: list[Sequence[bytes]] = field(default_factory=list)
    """Digests of the expected blocks of each request that ended between the last two reports."""


@dataclass(slots=True)
class Assignment:
    """The replica of a request, and the blocks that the request is expected to store there."""

    name: str
    load: RequestLoad
    expected_blocks: Sequence[bytes]
    """Digests of the blocks, for `PrefixMap.clear_expected`."""
    replica: _Replica
    """The state object of the replica when it was chosen.

    A replica that was removed and reports again has a new state object.
    """


class ReplicaChoice:
    """Chooses replicas by their prefix caches, sessions and load, as `WorkerRouter` chooses workers.

    The replicas report the changes of their caches every few seconds. The blocks of a request that was sent
    to a replica count as cached there until the second report after the end of the request.

    Args:
        num_ingresses: the number of HTTP processes that choose replicas. Each process counts only the
            requests that it has sent, and multiplies their load by ``num_ingresses``, because all processes
            get about the same number of requests.
    """

    def __init__(self, num_ingresses: int = 1) -> None:
        self._loads = WorkerLoads(weight=num_ingresses)
        self._prefixes = PrefixMap()
        self._policy: PrefixAware | None = None
        self._info: WorkerInfo | None = None
        self._replicas: list[_Replica | None] = []  # indexed by replica number; None if the number is free
        self._usable_replicas = 0  # bit set of the replica numbers in use

    @property
    def positions(self) -> dict[str, int]:
        """Name of each replica -> position in its `CacheLog`. This is the argument of `Replicas.reports`."""
        return {replica.name: replica.position for replica in self._replicas if replica is not None}

    def update(self, reports: Mapping[str, ReplicaReport]) -> None:
        """Add and remove replicas to match the reports, and apply the cache events of the reports."""
        numbers = {
            replica.name: number for number, replica in enumerate(self._replicas) if replica is not None
        }
        for name in numbers.keys() - reports.keys():
            self._remove(numbers[name])
        for name, report in reports.items():
            number = numbers[name] if name in numbers else self._add(name, report)
            replica = self._replicas[number]
            assert replica is not None
            if report.cache is not None:
                self._prefixes.update(number, report.cache.events)
                replica.position = report.cache.position
            # The report may lack blocks of requests that ended while the replica sent the report. These
            # blocks stay expected until the next report.
            for expected_blocks in replica.blocks_before_report:
                self._prefixes.clear_expected(expected_blocks)
            replica.blocks_before_report, replica.blocks_since_report = replica.blocks_since_report, []

    def assign(self, context: RequestContext, lost_replicas: Collection[str] = ()) -> Assignment | None:
        """Choose the replica of a request.

        Args:
            context: the request.
            lost_replicas: the names of replicas that cannot be chosen.

        Returns:
            The assignment, which must be passed to `end` when the request has ended or has left the replica.
            None if there is no replica to choose.
        """
        usable_replicas = self._usable_replicas
        for number, replica in enumerate(self._replicas):
            if replica is not None and replica.name in lost_replicas:
                usable_replicas &= ~(1 << number)
        if not usable_replicas:
            return None
        assert self._info is not None
        assert self._policy is not None
        digests = prompt_digests(context, self._info)
        number = self._policy.choose(context, digests, self._loads, usable_replicas)
        replica = self._replicas[number]
        assert replica is not None
        depth = self._prefixes.depth(number, digests)
        load = self._loads.add(number, num_uncached_tokens(context, self._info, depth))
        return Assignment(replica.name, load, self._prefixes.expect(number, digests), replica)

    def start(self, assignment: Assignment) -> None:
        """Record that the first result of a request has arrived."""
        if self._replicas[assignment.load.worker] is assignment.replica:
            self._loads.start(assignment.load)

    def end(self, assignment: Assignment) -> None:
        """Record that a request has ended, or has left its replica."""
        replica = assignment.replica
        if self._replicas[assignment.load.worker] is not replica:  # the replica was removed
            self._prefixes.clear_expected(assignment.expected_blocks)
            return
        self._loads.end(assignment.load)
        replica.blocks_since_report.append(assignment.expected_blocks)

    def _add(self, name: str, report: ReplicaReport) -> int:
        """Add a new replica and return its number."""
        if self._policy is None:
            self._info = report.info
            self._policy = PrefixAware(self._prefixes, report.info.block_size, report.info.max_batch_size)
        if None in self._replicas:
            number = self._replicas.index(None)
        else:
            number = len(self._replicas)
            self._replicas.append(None)
            self._loads.add_worker()
        self._replicas[number] = _Replica(name)
        self._usable_replicas |= 1 << number
        return number

    def _remove(self, number: int) -> None:
        """Remove a replica that has ended, and its blocks and load."""
        replica = self._replicas[number]
        assert replica is not None
        for expected_blocks in (*replica.blocks_since_report, *replica.blocks_before_report):
            self._prefixes.clear_expected(expected_blocks)
        self._prefixes.update(number, [BlocksCleared()])
        self._replicas[number] = None
        self._loads.clear(number)
        self._usable_replicas &= ~(1 << number)
