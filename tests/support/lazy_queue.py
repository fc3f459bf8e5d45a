"""A fake device queue that delays work until a caller waits for a result."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import pytest
from torch import Tensor

from penstock.kernels import BACKENDS, DeviceQueue, HostCopy, SubmittedWork, cpu

T = TypeVar("T")


class LazyWork(SubmittedWork[T], Generic[T]):
    """A submitted function and, after it has run, its result."""

    def __init__(self, queue: LazyQueue, work: Callable[[], T], *, is_copy: bool = False) -> None:
        self._queue, self.is_copy = queue, is_copy
        self._work: Callable[[], T] | None = work
        self._result: Any = None
        self._error: Exception | None = None

    @property
    def has_run(self) -> bool:
        return self._work is None

    def run(self) -> None:
        assert self._work is not None
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
        self._work = None  # releases the objects that the work references

    @property
    def value(self) -> T:
        self._queue.run_until(self)
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result


class LazyFetch(HostCopy):
    """A copy of a result to the host."""

    def __init__(self, work: LazyWork[Tensor]) -> None:
        self._work = work

    def wait(self) -> Tensor:
        return self._work.value


class LazyQueue(DeviceQueue):
    """Runs work in order of submission, up to the work whose result a caller waits for.

    A launched forward therefore runs after the host has prepared the next forward, so the launched
    forward must not read contexts. `num_early_reads` counts the results that the host reads, without `fetch`,
    before they are computed.
    """

    def __init__(self) -> None:
        self._waiting: deque[LazyWork[Any]] = deque()
        self._is_running = False
        self.num_early_reads = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, work: Callable[[], T]) -> LazyWork[T]:
        return self._add(LazyWork(self, work))

    def fetch(self, result: SubmittedWork[Tensor]) -> LazyFetch:
        return LazyFetch(self._add(LazyWork(self, lambda: result.value.clone(), is_copy=True)))

    def _add(self, work: LazyWork[T]) -> LazyWork[T]:
        self._waiting.append(work)
        return work

    def run_until(self, target: LazyWork[Any]) -> None:
        if target.has_run:
            return
        assert not self._is_running, "the work reads the result of later work"
        self.num_early_reads += not target.is_copy
        self._is_running = True
        try:
            while not target.has_run:
                self._waiting.popleft().run()
        finally:
            self._is_running = False


def register_lazy(monkeypatch: pytest.MonkeyPatch) -> list[LazyQueue]:
    """Register the back end ``lazy``: the C++ kernels with a `LazyQueue`. Return the list of its queues."""
    queues: list[LazyQueue] = []

    def make_queue(ops: object) -> LazyQueue:
        queues.append(LazyQueue())
        return queues[-1]

    backend = replace(cpu.BACKEND, name="lazy", priority=-1, queue=make_queue)
    monkeypatch.setitem(BACKENDS._registered, "lazy", backend)
    return queues
