"""Which contexts run in the next step, and with how many tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from operator import attrgetter
from typing import Generic, TypeVar

from penstock.errors import ConfigError, InputError, InsufficientBlocksError, PenstockError
from penstock.kv_cache.interface import KVCache, restart
from penstock.kv_cache.reservation import ReservedBatch, reserve_steps
from penstock.pipelines.core import InputContext, Pipeline
from penstock.pipelines.core.interfaces import PipelineOutput
from penstock.scheduler.batch import Batch, Entry, is_whole, num_rows, set_rows
from penstock.scheduler.budget import decode_rows, prompt_rows, refuse_what_never_fits, smallest_chunk
from penstock.scheduler.isolation import Isolation, as_failure, take_failures
from penstock.scheduler.shares import Shares
from penstock.scheduler.waiting import WaitingQueue

ContextT = TypeVar("ContextT", bound=InputContext)
OutputT = TypeVar("OutputT", bound=PipelineOutput)

_STEPS_KEPT_FREE = 64
"""Steps for which a place stays free for others after they have come while one client held the rest."""


class Scheduler(Generic[ContextT, OutputT]):
    """Batches contexts continuously: any may join or leave between two steps.

    A context is waiting or running, and nothing else. Order is priority, then arrival. Contexts that generate
    are in every step; prompts share the rest of the token budget, cut into chunks where they must be. When
    blocks run out the context of lowest priority, of these the youngest, goes back to waiting, where it keeps
    its arrival; what it generated is computed again as part of its prompt, so it goes on as if nothing had
    happened.

    Contexts of several clients (``client_id``) share the batch. Within a priority, the client that holds the
    fewest places is admitted first, and clients take turns at prompts; the contexts of one client stay in
    order. Where places or blocks lack for a waiting context, the youngest context of the client that holds
    the most places is preempted, if that client holds at least two more than the waiting one's. When one
    client would hold all places again, one of them stays free for a while (``_STEPS_KEPT_FREE``).

    Everything here is called by one thread, but `cancel`, which any may call. An exception that
    ``pipeline.execute`` raises leaves the contexts as they were: the batch is run again by halves until the
    culprits stand alone, and those end with the error (`Isolation`). Where no part of the batch runs it
    passes through `step`, and the next step repeats the batch, without those cancelled meanwhile.

    Args:
        pipeline: executes the batches; its ``kv`` says what fits.
        max_batch_size: contexts that run at once; never more than ``max_batch_input_tokens``.
        max_batch_input_tokens: tokens that one step computes at most.
        min_chunk_size: prompts are not cut into smaller chunks, as far as the budget allows.
        enable_chunked_prefill: whether prompts are cut at all. Without it a longer prompt than the budget is
            refused; only one that outgrew the budget before it was preempted is cut.
        whole_prompts: never cut a prompt, because the pipeline cannot compute a part of one. A prompt that
            exceeds the budget runs in a step of its own.
        ready: whether a context may run yet (its grammar is compiled, its adapter loaded). Until then it
            waits and those behind it pass. An exception that it raises ends the request.
        isolates_faults: whether a batch that fails is run again by halves. Without it every exception of
            ``pipeline.execute`` passes through `step`.
    """

    def __init__(
        self,
        pipeline: Pipeline[ContextT, OutputT],
        *,
        max_batch_size: int,
        max_batch_input_tokens: int = 8192,
        min_chunk_size: int = 64,
        enable_chunked_prefill: bool = True,
        whole_prompts: bool = False,
        ready: Callable[[ContextT], bool] | None = None,
        isolates_faults: bool = True,
    ) -> None:
        limits = {
            "max_batch_size": max_batch_size,
            "max_batch_input_tokens": max_batch_input_tokens,
            "min_chunk_size": min_chunk_size,
        }
        for name, value in limits.items():
            if value < 1:
                raise ConfigError(name, f"must be at least 1, was {value}")
        self._pipeline = pipeline
        self._kv: KVCache = pipeline.kv
        self._max_batch_size = min(max_batch_size, max_batch_input_tokens)
        self._max_tokens = max_batch_input_tokens
        self._min_chunk = smallest_chunk(min_chunk_size, max_batch_input_tokens, self._max_batch_size)
        self._may_chunk_prefill = enable_chunked_prefill and not whole_prompts
        self._whole_prompts = whole_prompts
        self._ready = ready
        self._isolation = Isolation(pipeline) if isolates_faults else None
        self._arrivals = count()
        self._shares = Shares()
        self._waiting: WaitingQueue[Entry[ContextT]] = WaitingQueue(
            2 * self._max_batch_size, self._shares.rank
        )
        self._running: dict[str, Entry[ContextT]] = {}
        self._cancelled: deque[str] = deque()
        self._steps_kept_free = 0  # steps left in which no client may hold all places
        self.num_preemptions = 0
        """How often a context was sent back to waiting, since the beginning."""
        self.failures: dict[str, PenstockError] = {}
        """Requests that ended without an output, and why. Look here after each step; whoever has answered a
        request takes it out (``pop``)."""
        self.admitted: list[ContextT] = []
        """Contexts that the last step gave their first slot."""
        self.last_batch = (0, 0)
        """How many contexts the last step ran, and how many tokens of theirs: of several forwards, in the
        first. (0, 0) where there was nothing to run."""

    @property
    def kv(self) -> KVCache:
        """The cache that says what fits."""
        return self._kv

    @property
    def num_running(self) -> int:
        """Contexts that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Contexts that do not."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether there is reason to call `step`."""
        return bool(self._running or self._waiting or self._cancelled)

    def submit(self, context: ContextT) -> None:
        """Takes a context in.

        Raises:
            InputError: it could never run, even alone, or its ``request_id`` is in use.
        """
        chunk_size = self._min_chunk if self._may_chunk_prefill else None
        max_tokens = context.current_length if self._whole_prompts else self._max_tokens
        refuse_what_never_fits(context, self._kv, max_tokens=max_tokens, chunk_size=chunk_size)
        if context.request_id in self._running or context.request_id in self._waiting:
            raise InputError(f"request {context.request_id} is here already: give each request its own id")
        self._shares.enter(context.client_id)
        self._waiting.push(Entry(context, (-context.priority, next(self._arrivals))))

    def cancel(self, request_id: str) -> None:
        """Ends a request before the next step runs: there will be no output. A no-op where it has ended."""
        self._cancelled.append(request_id)

    def step(self, num_steps: int = 1) -> dict[str, OutputT]:
        """Runs one batch, if there is one.

        Args:
            num_steps: tokens to generate for each context, where the batch allows for more than one.

        Returns:
            The output of each context that ran, by request id. One that is done has left.
        """
        self._take_cancels()
        self._requeue_stale()
        self.admitted.clear()
        self._shares.begin_step()
        self._steps_kept_free = max(self._steps_kept_free - 1, 0)
        batch: Batch[ContextT] = Batch(self._max_tokens, max(num_steps, 1))
        self._add_decoding(batch)
        self._add_prompts(batch)
        entries = batch.entries
        contexts = ReservedBatch({request_id: entry.context for request_id, entry in entries.items()})
        self.last_batch = (len(entries), sum([num_rows(context) for context in contexts.values()]))
        outputs: dict[str, OutputT] = {}
        if entries:
            prompts = [entry for entry in entries.values() if not entry.is_decoding]
            whole = [entry for entry in prompts if is_whole(entry.context)]
            outputs, failures = self._execute(contexts, batch.num_steps)
            for entry in whole:
                entry.is_decoding = True
            for request_id, error in failures.items():
                self._fail(entries[request_id], error)
        self._retire(outputs)
        return outputs

    def _execute(
        self, contexts: dict[str, ContextT], num_steps: int
    ) -> tuple[dict[str, OutputT], dict[str, PenstockError]]:
        if self._isolation is not None:
            return self._isolation.execute(contexts, num_steps)
        outputs = self._pipeline.execute(contexts, num_steps)
        return outputs, take_failures(self._pipeline)

    # -- The batch --------------------------------------------------------------------------------------

    def _add_decoding(self, batch: Batch[ContextT]) -> None:
        """Add all contexts that decode. If blocks run out, preempt the last contexts in order."""
        decoding = sorted([e for e in self._running.values() if e.is_decoding], key=_key)
        num_left = batch.num_left
        all_rows = []
        for num_others, entry in zip(range(len(decoding) - 1, -1, -1), decoding, strict=True):
            rows = decode_rows(entry.num_remaining, num_left, num_others)
            set_rows(entry.context, rows)
            num_left -= rows
            all_rows.append(rows)
        if self._reserve_all(decoding, batch):
            for entry, rows in zip(decoding, all_rows, strict=True):
                batch.add(entry, rows)
            return
        for entry, rows in zip(decoding, all_rows, strict=True):
            if entry.request_id not in self._running:
                continue  # preempted by one before it
            if self._reserve(entry, rows, rows, batch, may_preempt=True):
                batch.add(entry, rows)

    def _reserve_all(self, entries: list[Entry[ContextT]], batch: Batch[ContextT]) -> bool:
        """Reserve blocks for all steps of the entries; False if the free blocks do not suffice."""
        try:
            batch.num_steps = reserve_steps(self._kv, [e.context for e in entries], batch.num_steps)
        except InsufficientBlocksError:
            batch.num_steps = 1
            return False
        return True

    def _add_prompts(self, batch: Batch[ContextT]) -> None:
        """Prompts in order, running and waiting alike, as long as tokens, places and blocks last."""
        prompts = [entry for entry in self._running.values() if not entry.is_decoding]
        admits = self._has_slot() or self._shares.is_contended
        if admits:
            self._waiting.recheck(self._is_ready)
        while batch.num_left > 0:
            prompts = [entry for entry in prompts if entry.request_id in self._running]
            entry = min(prompts, key=self._shares.turn_of, default=None)
            admits = admits and (self._has_slot() or self._shares.is_contended)
            waiting = self._waiting.first_ready(self._is_ready) if admits else None
            if waiting is not None and not (
                entry is not None and self._shares.turn_of(entry) < self._shares.turn_of(waiting)
            ):
                admits = self._admit(waiting, batch)
                if not admits:
                    continue
                entry = waiting
            elif entry is not None:
                prompts.remove(entry)
            else:
                break
            rows = self._reserve_prompt(entry, batch)
            if not rows:
                break  # what is left goes to nobody: those behind would overtake
            batch.add(entry, rows)
            self._shares.serve(entry.client_id)

    def _admit(self, entry: Entry[ContextT], batch: Batch[ContextT]) -> bool:
        """Moves a waiting context to the running ones, if tokens, a place and blocks for all of its prompt
        are there, or can be had of a client that holds more than its share."""
        context = entry.context
        if not self._prompt_rows(entry, context.end_idx, batch):
            return False
        if not self._find_room(entry, batch):
            return False
        self._waiting.remove(entry.request_id)
        self._running[entry.request_id] = entry
        self._shares.start(entry.client_id)
        if self._shares.is_contended and self._shares.max_running >= self._max_batch_size - 1 > 0:
            self._steps_kept_free = _STEPS_KEPT_FREE
        num_cached = context.num_cached_tokens
        self._kv.claim(context)
        if entry.was_admitted:  # it may have found its own blocks: the first count is the user's
            context.num_cached_tokens = num_cached
        else:
            entry.was_admitted = True
            self.admitted.append(context)
        return True

    def _find_room(self, entry: Entry[ContextT], batch: Batch[ContextT]) -> bool:
        """Whether there are a place and blocks for a waiting context, after up to two preemptions."""
        if (
            self._steps_kept_free
            and self._shares.num_running(entry.client_id) == self._max_batch_size - 1 > 0
        ):
            return False
        for has_room in (self._has_slot, lambda: self._has_blocks(entry)):
            if not has_room():
                last = self._shares.last_in_excess(entry, self._running.values())
                if last is None:
                    return False
                self._preempt(last, batch)
        return self._has_blocks(entry)

    def _has_blocks(self, entry: Entry[ContextT]) -> bool:
        """Whether there are blocks for all tokens of a waiting context.

        Besides those a block must be left for each that runs, or it would soon be preempted again. Where
        nobody runs there is nothing to wait for: it is let in, and fails if it does not fit.
        """
        chunk = self._min_chunk if self._may_chunk(entry) else None
        headroom = len(self._running)
        return not headroom or self._kv.admits(entry.context, chunk_size=chunk, headroom=headroom)

    def _reserve_prompt(self, entry: Entry[ContextT], batch: Batch[ContextT]) -> int:
        rows = self._prompt_rows(entry, entry.num_remaining, batch)
        smallest = min(rows, self._min_chunk) if self._may_chunk(entry) else rows
        return self._reserve(entry, rows, smallest, batch, may_preempt=not batch.entries) if rows else 0

    def _reserve(
        self,
        entry: Entry[ContextT],
        rows: int,
        smallest: int,
        batch: Batch[ContextT],
        *,
        may_preempt: bool,
    ) -> int:
        """Gets blocks for the next rows of a running context, or for fewer rows; 0 if not even for those."""
        context = entry.context
        while True:
            set_rows(context, rows)
            try:
                batch.num_steps = reserve_steps(self._kv, [context], batch.num_steps)
                return rows
            except InsufficientBlocksError as error:
                if rows > smallest:
                    rows = max(rows // 2, smallest)
                    continue
                if not may_preempt:
                    return 0
                last = max(self._running.values(), key=self._shares.expendability)
                if last is not entry:
                    self._preempt(last, batch)
                    continue
                if len(self._running) == 1:
                    self._fail(entry, error)
                else:
                    self._preempt(entry, batch)
                return 0

    # -- Coming and going -------------------------------------------------------------------------------

    def _has_slot(self) -> bool:
        return len(self._running) < self._max_batch_size

    def _may_chunk(self, entry: Entry[ContextT]) -> bool:
        outgrew_budget = entry.context.end_idx > self._max_tokens
        return self._may_chunk_prefill or (outgrew_budget and not self._whole_prompts)

    def _prompt_rows(self, entry: Entry[ContextT], num_remaining: int, batch: Batch[ContextT]) -> int:
        """Return how many of a prompt's remaining tokens this step computes; 0 if it has to wait."""
        if self._whole_prompts and not batch.entries:
            return num_remaining
        return prompt_rows(num_remaining, batch.num_left, self._min_chunk, may_cut=self._may_chunk(entry))

    def _is_ready(self, entry: Entry[ContextT]) -> bool:
        try:
            is_ready = self._ready is None or self._ready(entry.context)
            return is_ready and not self._kv.waits_for(entry.context)
        except Exception as error:
            self._fail(entry, as_failure(error))
            return False

    def _preempt(self, entry: Entry[ContextT], batch: Batch[ContextT]) -> None:
        batch.drop(entry.request_id)
        self._requeue(entry)
        self.num_preemptions += 1

    def _requeue_stale(self) -> None:
        """Sends contexts that must be computed again back to waiting, where they keep their arrival."""
        for entry in list(self._running.values()):
            if self._kv.is_stale(entry.context):
                self._requeue(entry)

    def _requeue(self, entry: Entry[ContextT]) -> None:
        del self._running[entry.request_id]
        self._shares.stop(entry.client_id)
        restart(self._kv, entry.context)
        entry.is_decoding = False
        self._waiting.push(entry)

    def _fail(self, entry: Entry[ContextT], error: PenstockError) -> None:
        self._leave(entry.request_id)
        self.failures[entry.request_id] = error

    def _take_cancels(self) -> None:
        while self._cancelled:
            self._leave(self._cancelled.popleft())

    def _retire(self, outputs: dict[str, OutputT]) -> None:
        for request_id, output in outputs.items():
            if output.is_done:
                self._leave(request_id)
        if not self._running and not self._waiting:
            self._kv.check_integrity()

    def _leave(self, request_id: str) -> None:
        entry = self._running.pop(request_id, None)
        if entry is not None:
            self._shares.stop(entry.client_id)
            self._waiting.refresh(entry.client_id)
        else:
            entry = self._waiting.remove(request_id)
        if entry is not None:
            self._shares.leave(entry.client_id)
            self._pipeline.release(entry.context)


_key = attrgetter("key")
