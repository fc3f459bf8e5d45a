"""`RequestQueues`: the waiting and the running contexts of a scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Generic, TypeVar

from penstock.errors import InputError, PenstockError
from penstock.kv_cache.interface import KVCache, restart
from penstock.pipelines.core import InputContext, Pipeline
from penstock.pipelines.core.interfaces import PipelineOutput
from penstock.scheduler.batch import Batch, Entry
from penstock.scheduler.budget import PromptBudget
from penstock.scheduler.isolation import as_failure
from penstock.scheduler.shares import ClientShares
from penstock.scheduler.waiting import WaitingQueue

ContextT = TypeVar("ContextT", bound=InputContext)
OutputT = TypeVar("OutputT", bound=PipelineOutput)


class RequestQueues(Generic[ContextT, OutputT]):
    """The contexts of a scheduler. A context is either waiting or running.

    Args:
        pipeline: releases the contexts.
        prompts: rejects contexts that can never run.
        max_batch_size: maximum number of contexts that run at once.
        ready: returns whether a context can run; None if all contexts can run.
    """

    def __init__(
        self,
        pipeline: Pipeline[ContextT, OutputT],
        prompts: PromptBudget,
        max_batch_size: int,
        ready: Callable[[ContextT], bool] | None,
    ) -> None:
        self._pipeline = pipeline
        self._kv: KVCache = pipeline.kv
        self._prompts = prompts
        self._max_batch_size = max_batch_size
        self._ready = ready
        self._arrivals = count()
        self._shares = ClientShares()
        self._waiting: WaitingQueue[Entry[ContextT]] = WaitingQueue(2 * max_batch_size, self._shares.rank)
        self._running: dict[str, Entry[ContextT]] = {}
        self._cancelled: deque[str] = deque()
        self.num_preemptions = 0
        """Number of preemptions since the scheduler was created."""
        self.failures: dict[str, PenstockError] = {}
        """Errors of failed requests, by request id. The caller of `step` removes each error (``pop``) after
        reporting the error."""

    @property
    def kv(self) -> KVCache:
        """The KV cache of the pipeline."""
        return self._kv

    @property
    def num_running(self) -> int:
        """Number of contexts that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of contexts without a slot."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any context is running or waiting, or a cancellation is pending."""
        return bool(self._running or self._waiting or self._cancelled)

    def submit(self, context: ContextT) -> None:
        """Add a context to the queue.

        Raises:
            InputError: the context can never run, even if it is the only context, or its ``request_id`` is in
                use.
        """
        self._prompts.check_fits_alone(context, self._kv)
        if context.request_id in self._running or context.request_id in self._waiting:
            raise InputError(f"request {context.request_id} is already submitted: use unique ids")
        self._shares.add_context(context.client_id)
        self._waiting.push(Entry(context, (-context.priority, next(self._arrivals))))

    def cancel(self, request_id: str) -> None:
        """Cancel a request before the next step. Does nothing if it has already finished."""
        self._cancelled.append(request_id)

    @property
    def _generating_entries(self) -> list[Entry[ContextT]]:
        """The running entries that still compute tokens. Only these entries hold blocks."""
        return [entry for entry in self._running.values() if entry.is_generating]

    def _has_slot(self) -> bool:
        return len(self._running) < self._max_batch_size

    def _is_ready(self, entry: Entry[ContextT]) -> bool:
        try:
            is_ready = self._ready is None or self._ready(entry.context)
            return is_ready and not self._kv.waits_for(entry.context)
        except Exception as error:
            self._fail(entry, as_failure(error))
            return False

    def _preempt(self, entry: Entry[ContextT], batch: Batch[ContextT]) -> None:
        self._requeue(entry)
        batch.drop(entry.request_id)
        self.num_preemptions += 1

    def _requeue_stale(self) -> None:
        """Move contexts with stale keys (`KVCache.is_stale`) back to the queue. They keep their sort keys."""
        for entry in list(self._running.values()):
            if self._kv.is_stale(entry.context):
                self._requeue(entry)

    def _requeue(self, entry: Entry[ContextT]) -> None:
        self._check_collected()
        del self._running[entry.request_id]
        self._shares.release_slot(entry.client_id)
        restart(self._kv, entry.context)
        entry.is_decoding = False
        self._waiting.push(entry)

    def _check_collected(self) -> None:
        """Do nothing. A subclass can raise an exception here before a running context loses its blocks."""

    def _fail(self, entry: Entry[ContextT], error: PenstockError) -> None:
        self._remove([entry.request_id])
        self.failures[entry.request_id] = error

    def _apply_cancels(self) -> None:
        while self._cancelled:
            self._remove([self._cancelled.popleft()])

    def _retire(self, outputs: dict[str, OutputT]) -> None:
        self._remove(request_id for request_id, output in outputs.items() if output.is_done)
        if not self._running and not self._waiting:
            self._kv.check_integrity()

    def _remove(self, request_ids: Iterable[str]) -> None:
        """Remove running or waiting contexts, and free their resources."""
        clients_with_free_slots = set()
        try:
            for request_id in request_ids:
                entry = self._running.pop(request_id, None)
                if entry is not None:
                    self._shares.release_slot(entry.client_id)
                    clients_with_free_slots.add(entry.client_id)
                else:
                    entry = self._waiting.remove(request_id)
                if entry is not None:
                    self._shares.remove_context(entry.client_id)
                    self._release(entry.context)
        finally:
            for client_id in clients_with_free_slots:
                self._waiting.refresh(client_id)

    def _release(self, context: ContextT) -> None:
        """Free the resources of a context that has ended."""
        self._pipeline.release(context)
