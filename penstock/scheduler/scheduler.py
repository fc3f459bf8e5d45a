"""Which contexts run in the next step, and with how many tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Generic, TypeVar

from penstock.errors import ConfigError, InputError, InsufficientBlocksError, PenstockError
from penstock.pipelines.core import InputContext, Pipeline
from penstock.pipelines.core.interfaces import PipelineOutput
from penstock.pipelines.kv_cache.interface import KVCache, restart
from penstock.scheduler.budget import decode_rows, prompt_rows, smallest_chunk
from penstock.scheduler.isolation import Isolation, as_failure, take_failures
from penstock.scheduler.waiting import WaitingQueue

ContextT = TypeVar("ContextT", bound=InputContext)
OutputT = TypeVar("OutputT", bound=PipelineOutput)


@dataclass(slots=True, eq=False)
class _Entry(Generic[ContextT]):
    context: ContextT
    key: tuple[int, int]  # -priority, arrival: the smallest is served first, the largest preempted first
    is_decoding: bool = False  # all it had to begin with is computed; now it generates
    was_admitted: bool = False

    @property
    def request_id(self) -> str:
        return self.context.request_id

    @property
    def num_remaining(self) -> int:
        return self.context.end_idx - self.context.start_idx


class Scheduler(Generic[ContextT, OutputT]):
    """Batches contexts continuously: any may join or leave between two steps.

    A context is waiting or running, and nothing else. Order is priority, then arrival. Contexts that generate
    are in every step; prompts share the rest of the token budget, cut into chunks where they must be. When
    blocks run out the context of lowest priority, of these the youngest, goes back to waiting, where it keeps
    its arrival; what it generated is computed again as part of its prompt, so it goes on as if nothing had
    happened.

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
        self._may_cut = enable_chunked_prefill
        self._ready = ready
        self._isolation = Isolation(pipeline) if isolates_faults else None
        self._arrivals = count()
        self._waiting: WaitingQueue[_Entry[ContextT]] = WaitingQueue(look_limit=2 * self._max_batch_size)
        self._running: dict[str, _Entry[ContextT]] = {}
        self._cancelled: deque[str] = deque()
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
        self._refuse_what_never_fits(context)
        if context.request_id in self._running or context.request_id in self._waiting:
            raise InputError(f"request {context.request_id} is here already: give each request its own id")
        self._waiting.push(_Entry(context, (-context.priority, next(self._arrivals))))

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
        batch: dict[str, _Entry[ContextT]] = {}
        num_left = self._add_decoding(batch, self._max_tokens)
        self._add_prompts(batch, num_left)
        contexts = {request_id: entry.context for request_id, entry in batch.items()}
        self.last_batch = (len(batch), sum([_num_rows(context) for context in contexts.values()]))
        outputs: dict[str, OutputT] = {}
        if batch:
            whole = [entry for entry in batch.values() if not entry.is_decoding and _is_whole(entry.context)]
            outputs, failures = self._execute(contexts, self._clamp(num_steps, batch))
            for entry in whole:
                entry.is_decoding = True
            for request_id, error in failures.items():
                self._fail(batch[request_id], error)
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

    def _add_decoding(self, batch: dict[str, _Entry[ContextT]], num_left: int) -> int:
        """All that generate. Blocks they lack are taken from the last in order."""
        decoding = sorted([e for e in self._running.values() if e.is_decoding], key=_key)
        for place, entry in enumerate(decoding):
            request_id = entry.request_id
            if request_id not in self._running:
                break  # preempted by one before it, as are all behind it
            rows = decode_rows(entry.num_remaining, num_left, len(decoding) - place - 1)
            if self._reserve(entry, rows, rows, may_preempt=True):
                batch[request_id] = entry
                num_left -= rows
        return num_left

    def _add_prompts(self, batch: dict[str, _Entry[ContextT]], num_left: int) -> None:
        """Prompts in order, running and waiting alike, as long as tokens, places and blocks last."""
        prompts = deque(sorted([e for e in self._running.values() if not e.is_decoding], key=_key))
        admits = self._has_place()
        if admits:
            self._waiting.look_again(self._is_ready)
        while num_left:
            entry = self._waiting.first_ready(self._is_ready) if admits and self._has_place() else None
            if entry is not None and not (prompts and prompts[0].key < entry.key):
                admits = self._admit(entry, num_left)
                if not admits:
                    continue
            elif prompts:
                entry = prompts.popleft()
            else:
                break
            rows = self._reserve_prompt(entry, num_left, may_preempt=not batch)
            if not rows:
                break  # what is left goes to nobody: those behind would overtake
            batch[entry.request_id] = entry
            num_left -= rows

    def _admit(self, entry: _Entry[ContextT], num_left: int) -> bool:
        """Moves a waiting context to the running ones, if tokens and blocks for all of its prompt are there.

        Besides those a block must be left for each that runs, or it would soon be preempted again. Where
        nobody runs there is nothing to wait for: it is let in, and fails if it does not fit.
        """
        context = entry.context
        may_cut = self._may_be_cut(entry)
        if not prompt_rows(context.end_idx, num_left, self._min_chunk, may_cut=may_cut):
            return False
        chunk = self._min_chunk if may_cut else None
        headroom = len(self._running)
        if self._running and not self._kv.admits(context, chunk_size=chunk, headroom=headroom):
            return False
        self._waiting.remove(entry.request_id)
        self._running[entry.request_id] = entry
        num_cached = context.num_cached_tokens
        self._kv.claim(context)
        if entry.was_admitted:  # it may have found its own blocks: the first count is the user's
            context.num_cached_tokens = num_cached
        else:
            entry.was_admitted = True
            self.admitted.append(context)
        return True

    def _reserve_prompt(self, entry: _Entry[ContextT], num_left: int, *, may_preempt: bool) -> int:
        may_cut = self._may_be_cut(entry)
        rows = prompt_rows(entry.num_remaining, num_left, self._min_chunk, may_cut=may_cut)
        smallest = min(rows, self._min_chunk) if may_cut else rows
        return self._reserve(entry, rows, smallest, may_preempt=may_preempt) if rows else 0

    def _reserve(self, entry: _Entry[ContextT], rows: int, smallest: int, *, may_preempt: bool) -> int:
        """Gets blocks for the next rows of a running context, or for fewer rows; 0 if not even for those."""
        context = entry.context
        while True:
            active_idx = context.start_idx + rows
            if active_idx != context.active_idx:
                context.set_token_indices(active_idx=active_idx)
            try:
                self._kv.reserve(context)
                return rows
            except InsufficientBlocksError as error:
                if rows > smallest:
                    rows = max(rows // 2, smallest)
                    continue
                if not may_preempt:
                    return 0
                last = max(self._running.values(), key=_key)
                if last is not entry:
                    self._preempt(last)
                    continue
                if len(self._running) == 1:
                    self._fail(entry, error)
                else:
                    self._preempt(entry)
                return 0

    def _clamp(self, num_steps: int, batch: dict[str, _Entry[ContextT]]) -> int:
        """How many steps all of a batch can do at once, with blocks for them reserved."""
        if num_steps <= 1:
            return 1
        contexts = [entry.context for entry in batch.values()]
        if not all(map(_is_whole, contexts)):
            return 1
        for context in contexts:
            if context.max_length is not None:
                num_steps = min(num_steps, context.max_length - context.end_idx)
        try:
            for context in contexts:
                self._kv.reserve(context, max(num_steps, 1) - 1)
        except InsufficientBlocksError:
            return 1  # several steps at once are a convenience: nobody is preempted for them
        return max(num_steps, 1)

    # -- Coming and going -------------------------------------------------------------------------------

    def _refuse_what_never_fits(self, context: ContextT) -> None:
        length = context.current_length
        if not self._may_cut and length > self._max_tokens:
            raise InputError(
                f"the prompt has {length} tokens, but a step computes at most {self._max_tokens} and prompts "
                "are not cut: shorten the prompt, raise --max-batch-input-tokens, or allow chunked prefill"
            )
        longest = max(length, context.max_length or 0)
        if not self._kv.fits(longest, self._min_chunk if self._may_cut else None):
            raise InputError(
                f"prompt and output together may take {longest} tokens ({length} of them the prompt), which "
                f"do not fit the {self._kv.num_blocks} blocks of the KV cache: ask for fewer new tokens, "
                "or give the KV cache more memory"
            )

    def _has_place(self) -> bool:
        return len(self._running) < self._max_batch_size

    def _may_be_cut(self, entry: _Entry[ContextT]) -> bool:
        return self._may_cut or entry.context.end_idx > self._max_tokens

    def _is_ready(self, entry: _Entry[ContextT]) -> bool:
        try:
            is_ready = self._ready is None or self._ready(entry.context)
            return is_ready and not self._kv.waits_for(entry.context)
        except Exception as error:
            self._fail(entry, as_failure(error))
            return False

    def _preempt(self, entry: _Entry[ContextT]) -> None:
        self._requeue(entry)
        self.num_preemptions += 1

    def _requeue_stale(self) -> None:
        """Sends contexts that must be computed again back to waiting, where they keep their arrival."""
        for entry in list(self._running.values()):
            if self._kv.is_stale(entry.context):
                self._requeue(entry)

    def _requeue(self, entry: _Entry[ContextT]) -> None:
        del self._running[entry.request_id]
        restart(self._kv, entry.context)
        entry.is_decoding = False
        self._waiting.push(entry)

    def _fail(self, entry: _Entry[ContextT], error: PenstockError) -> None:
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
        entry = self._running.pop(request_id, None) or self._waiting.remove(request_id)
        if entry is not None:
            self._pipeline.release(entry.context)


_key = attrgetter("key")


def _num_rows(context: InputContext) -> int:
    """The tokens of a context that the next forward computes."""
    return context.active_idx - context.start_idx


def _is_whole(context: InputContext) -> bool:
    """Whether all tokens of a context are computed after this step."""
    return context.active_idx == context.end_idx
