"""`Scheduler`: selects the contexts of the next step and the number of tokens of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter
from typing import TypeVar

from penstock.errors import InsufficientBlocksError
from penstock.kv_cache.reservation import reserve_steps
from penstock.pipelines.core import InputContext, Pipeline
from penstock.pipelines.core.interfaces import PipelineOutput
from penstock.scheduler.batch import Batch, Entry, computes_last_token, set_rows, splittable_rows
from penstock.scheduler.budget import PromptBudget, check_limits, decode_rows, smallest_chunk
from penstock.scheduler.deferral import PROMPT_TOKENS_PER_ROW, Deferral
from penstock.scheduler.isolation import Isolation
from penstock.scheduler.request_queues import RequestQueues
from penstock.scheduler.step_limit import StepLimit

ContextT = TypeVar("ContextT", bound=InputContext)
OutputT = TypeVar("OutputT", bound=PipelineOutput)

_SLOT_FREE_STEPS = 64
"""Number of steps for which one slot stays free for other clients after one client holds all other slots."""

_MAX_TIMED_PROMPT_TOKENS = 64
"""Maximum number of prompt tokens in a step whose duration is recorded. With more prompt tokens, the duration
of a step does not grow in proportion to the number of prompt tokens.
"""


class Scheduler(RequestQueues[ContextT, OutputT]):
    """Continuous batching: contexts join and leave the batch between two steps.

    A context is either waiting or running. Contexts are sorted by priority, then by arrival. Each step
    contains all contexts that decode, except those that `Deferral` and `StepLimit` move to a later step.
    Prompts share the rest of the token budget, in chunks if necessary. If blocks run out, a context of the
    lowest priority is preempted: the youngest context of the client with the most slots. The preempted
    context returns to the queue and keeps its arrival number. Later steps compute its tokens again, except
    those of a cached prefix.

    Contexts of several clients (``client_id``) share the batch. Within a priority, contexts of the client
    with the fewest slots are admitted first, and the prompts of the clients are computed in turn. The
    contexts of one client stay in order. If a waiting context lacks a slot or blocks, the youngest context of
    the client with the most slots is preempted, if that client holds at least two slots more than the waiting
    context's client. When one of several clients holds all slots except one, the last slot stays free for
    other clients for `_SLOT_FREE_STEPS` steps.

    One thread calls all methods except `cancel`, which any thread may call. If ``pipeline.execute`` raises,
    contexts are unchanged. The batch then runs again in halves until the failing contexts are found, and
    the failing contexts end with the error. `step` raises the exceptions that `Isolation.execute` raises. The
    contexts of the batch then remain in the scheduler, and later steps run them again.

    Args:
        pipeline: executes the batches; its ``kv`` decides which contexts fit into the cache.
        max_batch_size: maximum number of contexts that run at once, limited to ``max_batch_input_tokens``.
        max_batch_input_tokens: maximum number of tokens of one step.
        min_chunk_size: smallest chunk of a prompt in tokens. The effective value is smaller if the decoding
            contexts of a full batch leave fewer tokens.
        enable_chunked_prefill: whether prompts are cut into chunks. If not, a prompt that exceeds the budget
            is rejected. Only a preempted context is cut, if its prompt and generated tokens exceed the
            budget.
        whole_prompts: whether prompts are never cut, because the pipeline cannot compute a part of a prompt.
            A prompt that exceeds the budget runs alone in a step.
        ready: returns whether a context can run (its grammar is compiled, its adapter is loaded). Ready
            contexts overtake contexts that are not ready. An exception of ``ready`` ends the request.
        isolates_faults: whether a failed batch runs again in halves. If not, `step` raises every exception of
            ``pipeline.execute``.
        clock: returns the time in seconds.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_limits(
            max_batch_size=max_batch_size,
            max_batch_input_tokens=max_batch_input_tokens,
            min_chunk_size=min_chunk_size,
        )
        max_batch_size = min(max_batch_size, max_batch_input_tokens)
        prompts = PromptBudget(
            max_batch_input_tokens,
            smallest_chunk(min_chunk_size, max_batch_input_tokens, max_batch_size),
            may_cut=enable_chunked_prefill,
            whole_prompts=whole_prompts,
        )
        super().__init__(pipeline, prompts, max_batch_size, ready)
        self._isolation = Isolation(pipeline, is_enabled=isolates_faults)
        self._deferral = Deferral()
        self._clock = clock
        self._step_limit = StepLimit(clock)
        self._slot_free_steps = 0  # remaining steps in which no client may hold all slots
        self.admitted: list[ContextT] = []
        """Contexts that received their first slot in the last step."""
        self.last_batch = (0, 0)
        """(number of contexts, number of tokens) in the first forward of the last step; (0, 0) if no context
        ran."""

    def step(self, num_steps: int = 1) -> dict[str, OutputT]:
        """Run one batch if any context can run.

        Args:
            num_steps: maximum number of tokens to generate for each context. `reserve_steps` chooses the
                actual number.

        Returns:
            The output of each context that ran, by request id. Finished contexts are removed.

        Raises:
            Exception: ``pipeline.execute`` raised the exception, and `Isolation.execute` did not isolate it.
        """
        self._begin_step()
        batch = self._next_batch(num_steps)
        outputs = self._run_timed(batch) if batch.entries else {}
        self._retire(outputs)
        return outputs

    def _begin_step(self) -> None:
        self._apply_cancels()
        self.admitted.clear()
        self._shares.begin_step()
        if self._shares.is_contended:
            self._step_limit.note_contention()
        self._slot_free_steps = max(self._slot_free_steps - 1, 0)

    def _next_batch(self, num_steps: int) -> Batch[ContextT]:
        """Build the next batch, which may be empty. Its contexts have slots and blocks."""
        self._requeue_stale()
        if self._has_slot() or self._shares.is_contended:
            self._waiting.recheck(self._is_ready)
        batch: Batch[ContextT] = Batch(self._prompts.max_tokens, max(num_steps, 1))
        self._add_decoding(batch)
        self._add_prompts(batch)
        self.last_batch = (len(batch.entries), batch.num_rows)
        return batch

    def _run_timed(self, batch: Batch[ContextT]) -> dict[str, OutputT]:
        """Run a batch, and record its duration unless it computes more than 64 prompt tokens."""
        decode_rows = batch.num_decode_rows
        prompt_rows = self.last_batch[1] - decode_rows
        start = self._clock()
        outputs = self._run(batch.contexts, batch.num_steps)
        if prompt_rows <= _MAX_TIMED_PROMPT_TOKENS:
            seconds = (self._clock() - start) / batch.num_steps
            self._step_limit.record(decode_rows + prompt_rows / PROMPT_TOKENS_PER_ROW, seconds)
        return outputs

    def _run(self, contexts: dict[str, ContextT], num_steps: int) -> dict[str, OutputT]:
        """Run a batch, end the contexts that fail, and return the outputs of all other contexts."""
        entries = [self._running[request_id] for request_id in contexts]
        complete_prompts = [
            entry for entry in entries if not entry.is_decoding and computes_last_token(entry.context)
        ]
        outputs, failures = self._isolation.execute(contexts, num_steps)
        for entry in complete_prompts:
            entry.is_decoding = True
        for request_id, error in failures.items():
            self._fail(self._running[request_id], error)
        return outputs

    def _decoding_entries(self) -> list[Entry[ContextT]]:
        """Return the running entries that decode."""
        return [entry for entry in self._running.values() if entry.is_decoding]

    def _add_decoding(self, batch: Batch[ContextT]) -> None:
        """Add the decoding contexts. If blocks run out, preempt contexts.

        A context that has generated its last token is added, but computes no token and needs no blocks.
        """
        decoding_entries = sorted(self._decoding_entries(), key=_sort_key)
        for entry in (entry for entry in decoding_entries if not entry.is_generating):
            batch.add(entry, 0)
        decoding_entries = [entry for entry in decoding_entries if entry.is_generating]
        if self._shares.is_contended:
            decoding_entries = self._deferral.select(decoding_entries, self._next_prompt())
        decoding_entries, batch.num_steps = self._step_limit.select(decoding_entries, batch.num_steps)
        num_unused_tokens = batch.num_unused_tokens
        rows_by_entry = []
        for num_later_contexts, entry in zip(
            range(len(decoding_entries) - 1, -1, -1), decoding_entries, strict=True
        ):
            rows = decode_rows(entry.num_remaining_tokens, num_unused_tokens, num_later_contexts)
            set_rows(entry.context, rows)
            num_unused_tokens -= rows
            rows_by_entry.append(rows)
        if self._reserve_all(decoding_entries, batch):
            for entry, rows in zip(decoding_entries, rows_by_entry, strict=True):
                batch.add(entry, rows)
            return
        for entry, rows in zip(decoding_entries, rows_by_entry, strict=True):
            if entry.request_id not in self._running:
                continue  # the entry was preempted in an earlier iteration
            if self._reserve(entry, rows, rows, batch, may_preempt=True):
                batch.add(entry, rows)

    def _reserve_all(self, entries: list[Entry[ContextT]], batch: Batch[ContextT]) -> bool:
        """Reserve blocks for ``batch.num_steps`` steps or fewer. Set ``batch.num_steps`` to their number.

        Returns False if the free blocks do not suffice for one step.
        """
        try:
            batch.num_steps = reserve_steps(self._kv, [entry.context for entry in entries], batch.num_steps)
        except InsufficientBlocksError:
            batch.num_steps = 1
            return False
        return True

    def _next_prompt(self) -> Entry[ContextT] | None:
        """Return the entry whose prompt the next step computes first; None if no prompt can run."""
        waiting_entry = self._waiting.first_ready(self._is_ready)
        if waiting_entry is not None and not (self._has_slot() and self._has_blocks(waiting_entry)):
            waiting_entry = None
        prompt_entries = [entry for entry in self._running.values() if not entry.is_decoding]
        if waiting_entry is not None:
            prompt_entries.append(waiting_entry)
        return min(prompt_entries, key=self._shares.prompt_key, default=None)

    def _add_prompts(self, batch: Batch[ContextT]) -> None:
        """Add running and waiting prompts in order, while tokens, slots and blocks suffice."""
        prompts = [entry for entry in self._running.values() if not entry.is_decoding]
        can_admit = True
        while batch.num_unused_tokens > 0:
            prompts = [entry for entry in prompts if entry.request_id in self._running]
            entry = min(prompts, key=self._shares.prompt_key) if prompts else None
            can_admit = can_admit and (self._has_slot() or self._shares.is_contended)
            waiting_entry = self._waiting.first_ready(self._is_ready) if can_admit else None
            if waiting_entry is not None and not (
                entry is not None and self._shares.prompt_key(entry) < self._shares.prompt_key(waiting_entry)
            ):
                can_admit = self._admit(waiting_entry, batch)
                if not can_admit:
                    continue
                entry = waiting_entry
            elif entry is not None:
                prompts.remove(entry)
            else:
                break
            rows = self._reserve_prompt(entry, batch)
            if not rows:
                break  # later prompts must not overtake this one
            batch.add(entry, rows)
            self._shares.move_to_end(entry.client_id)

    def _admit(self, entry: Entry[ContextT], batch: Batch[ContextT]) -> bool:
        """Move a waiting context to the running contexts.

        Returns False if tokens, slots or blocks do not suffice, otherwise True. The method may preempt
        contexts of a client that holds at least two slots more than the client of the waiting context.
        """
        context = entry.context
        if not self._prompts.rows(context, context.end_idx, batch):
            return False
        if not self._make_room(entry, batch):
            return False
        self._waiting.remove(entry.request_id)
        self._running[entry.request_id] = entry
        self._shares.add_slot(entry.client_id)
        if self._shares.is_contended and self._shares.max_slots >= self._max_batch_size - 1 > 0:
            self._slot_free_steps = _SLOT_FREE_STEPS
        num_cached = context.num_cached_tokens
        self._kv.claim(context)
        if entry.was_admitted:
            # After a preemption, cached blocks can be blocks that the context computed itself.
            context.num_cached_tokens = num_cached
        else:
            entry.was_admitted = True
            self.admitted.append(context)
        return True

    def _make_room(self, entry: Entry[ContextT], batch: Batch[ContextT]) -> bool:
        """Return whether a slot and enough blocks are free for a waiting context.

        Preempts up to two contexts if necessary and allowed (`ClientShares.entry_to_preempt`).
        """
        if self._slot_free_steps and self._shares.num_slots(entry.client_id) == self._max_batch_size - 1 > 0:
            return False
        if self._has_slot() and self._has_blocks(entry):
            return True
        for has_room in (self._has_slot, lambda: self._has_blocks(entry)):
            if not has_room():
                preempted_entry = self._shares.entry_to_preempt(entry, self._generating_entries)
                if preempted_entry is None:
                    return False
                self._preempt(preempted_entry, batch)
        return self._has_blocks(entry)

    def _has_blocks(self, entry: Entry[ContextT]) -> bool:
        """Return whether the cache has free blocks for all tokens of a waiting context.

        In addition, one block must stay free for each running context, so that the new context is not soon
        preempted. The result is True if no context runs, because waiting would then free no blocks.
        """
        chunk = self._prompts.min_chunk_size_for(entry.context)
        headroom = len(self._running)
        return not headroom or self._kv.admits(entry.context, chunk_size=chunk, headroom=headroom)

    def _reserve_prompt(self, entry: Entry[ContextT], batch: Batch[ContextT]) -> int:
        rows = self._prompts.rows(entry.context, entry.num_remaining_tokens, batch)
        min_rows = min(rows, self._prompts.min_chunk_size_for(entry.context) or rows)
        min_rows = splittable_rows(entry.context, min_rows)
        return self._reserve(entry, rows, min_rows, batch, may_preempt=not batch.entries) if rows else 0

    def _reserve(
        self,
        entry: Entry[ContextT],
        rows: int,
        min_rows: int,
        batch: Batch[ContextT],
        *,
        may_preempt: bool,
    ) -> int:
        """Reserve blocks for up to ``rows`` tokens of a running context, and return the number of tokens.

        The number is at least ``min_rows``, or 0 if there are not enough free blocks. With ``may_preempt``,
        other contexts or this context are preempted until the blocks suffice. If no other context holds
        blocks, this context fails.
        """
        context = entry.context
        while True:
            set_rows(context, rows)
            try:
                batch.num_steps = reserve_steps(self._kv, [context], batch.num_steps)
                return rows
            except InsufficientBlocksError as error:
                if rows > min_rows:
                    rows = max(splittable_rows(context, rows // 2, may_grow=False), min_rows)
                    continue
                if not may_preempt:
                    return 0
                preempted_entry = max(self._generating_entries, key=self._shares.preemption_key)
                if preempted_entry is not entry:
                    self._preempt(preempted_entry, batch)
                    continue
                if len(self._generating_entries) == 1:
                    self._check_collected()
                    self._fail(entry, error)
                else:
                    self._preempt(entry, batch)
                return 0


_sort_key = attrgetter("sort_key")
