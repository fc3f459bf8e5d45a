"""`ReplicaChoice`: the choice of the replica for a request, with the policy of several workers."""

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
    """What is known about a replica."""

    name: str
    position: int = 0
    """The position in the log of its cache."""
    ended: list[Sequence[bytes]] = field(default_factory=list)
    """Blocks that requests have stored since the last report."""
    reported: list[Sequence[bytes]] = field(default_factory=list)
    """Blocks that requests had stored before the last report."""


@dataclass(slots=True)
class Assignment:
    """The replica of a request, and the blocks that it is expected to store."""

    name: str
    load: RequestLoad
    expected: Sequence[bytes]
    replica: _Replica
    """The replica as it was known when the request began."""


class ReplicaChoice:
    """Chooses replicas by their prefix caches, sessions and load, as `WorkerRouter` chooses workers.

    The replicas report the changes of their caches every few seconds. Until then, the blocks of the requests
    that ran on a replica count as cached.

    Args:
        num_ingresses: the number of processes that choose replicas. Each has about the same share of the
            requests and knows its own ones only.
    """

    def __init__(self, num_ingresses: int = 1) -> None:
        self._loads = WorkerLoads(weight=num_ingresses)
        self._prefixes = PrefixMap()
        self._policy: PrefixAware | None = None
        self._info: WorkerInfo | None = None
        self._replicas: list[_Replica | None] = []  # by number; None for a free number
        self._usable = 0  # the numbers of the replicas, as a bit set

    @property
    def positions(self) -> dict[str, int]:
        """The position in the cache log of each replica, by name: the argument of the next reports."""
        return {replica.name: replica.position for replica in self._replicas if replica is not None}

    def update(self, reports: Mapping[str, ReplicaReport]) -> None:
        """Replace the known replicas by those that have reported, and apply the changes of their caches."""
        known = {replica.name: number for number, replica in enumerate(self._replicas) if replica is not None}
        for name in known.keys() - reports.keys():
            self._remove(known[name])
        for name, report in reports.items():
            number = known[name] if name in known else self._add(name, report)
            replica = self._replicas[number]
            assert replica is not None
            if report.cache is not None:
                self._prefixes.update(number, report.cache.events)
                replica.position = report.cache.position
            # A request that ended while the replicas reported may be missing in this report.
            for expected in replica.reported:
                self._prefixes.clear_expected(expected)
            replica.reported, replica.ended = replica.ended, []

    def assign(self, context: RequestContext, lost: Collection[str] = ()) -> Assignment | None:
        """Choose the replica of a request.

        Args:
            context: the request.
            lost: the names of replicas that cannot be chosen.

        Returns:
            The replica; `end` must be called when the request has ended there. None if no replica is known.
        """
        usable = self._usable
        for number, replica in enumerate(self._replicas):
            if replica is not None and replica.name in lost:
                usable &= ~(1 << number)
        if not usable:
            return None
        assert self._info is not None
        assert self._policy is not None
        digests = prompt_digests(context, self._info)
        number = self._policy.choose(context, digests, self._loads, usable)
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
        if self._replicas[assignment.load.worker] is not replica:  # it was removed, and perhaps came back
            self._prefixes.clear_expected(assignment.expected)
            return
        self._loads.end(assignment.load)
        replica.ended.append(assignment.expected)

    def _add(self, name: str, report: ReplicaReport) -> int:
        """Return a number for a new replica."""
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
        self._usable |= 1 << number
        return number

    def _remove(self, number: int) -> None:
        """Forget a replica that has ended."""
        replica = self._replicas[number]
        assert replica is not None
        for expected in (*replica.ended, *replica.reported):
            self._prefixes.clear_expected(expected)
        self._prefixes.update(number, [BlocksCleared()])
        self._replicas[number] = None
        self._loads.clear(number)
        self._usable &= ~(1 << number)
