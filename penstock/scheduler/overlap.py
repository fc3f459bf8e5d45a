"""`OverlappedScheduler`: a scheduler that launches a step before it collects the previous step.

A step of the scheduler, with batch n running on the device::

    advance(n)      its contexts move past the tokens that n samples, whose ids are not known yet
    batch n + 1     is built: decoding contexts of n, and prompts
    launch(n + 1)   the device runs it after n
    collect(n)      waits for n; contexts take their tokens, finished ones leave
    sample(n + 1)   for the contexts that are still running

A context that leaves while a launched step uses its blocks keeps them until that step is collected.

Steps of a few contexts are shorter than the host's time per step. If nothing needs the host between them,
several run in one call of `Pipeline.execute` instead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from penstock.errors import PenstockError
from penstock.kv_cache.reservation import ReservedBatch
from penstock.pipelines.core import InputContext, Pipeline
from penstock.pipelines.core.interfaces import PipelineOutput, StepLauncher
from penstock.scheduler.batch import Batch, Entry, is_whole
from penstock.scheduler.isolation import take_failures
from penstock.scheduler.scheduler import Scheduler

ContextT = TypeVar("ContextT", bound=InputContext)
OutputT = TypeVar("OutputT", bound=PipelineOutput)

_MAX_AHEAD = 8
"""Maximum number of contexts that run several steps in one call. With more contexts a step takes longer than
the host needs for the next one."""

_LOG = logging.getLogger(__name__)


class _CollectFirst(Exception):
    """The next batch needs blocks of contexts that a launched step uses."""


@dataclass(slots=True, eq=False)
class _Launched(Generic[ContextT]):
    """A step that was launched and is not collected."""

    step: Any
    batch: ReservedBatch[ContextT]
    prompts: list[Entry[ContextT]]
    """Entries whose prompt is computed whole after this step."""
    sampled: frozenset[str] = frozenset()
    """Request ids of the contexts whose tokens the step samples."""
    held: list[ContextT] = field(default_factory=list)
    """Contexts that have ended. They are released when the step is collected."""


class OverlappedScheduler(Scheduler[ContextT, OutputT]):
    """Schedules steps of a `StepLauncher`; see `Scheduler` for everything else.

    The output of a context is returned one call of `step` after the call that has launched its step. If the
    next batch cannot be built without preemption, the running step is collected first. A step that fails runs
    again through `Pipeline.execute`, in halves if needed.

    Args:
        pipeline: see `Scheduler`.
        steps: launches the steps of the pipeline.
        **limits: see `Scheduler`.
    """

    def __init__(
        self,
        pipeline: Pipeline[ContextT, OutputT],
        *,
        steps: StepLauncher[ContextT, OutputT, Any],
        **limits: Any,
    ) -> None:
        super().__init__(pipeline, **limits)
        self._steps = steps
        self._open: _Launched[ContextT] | None = None
        """The step that was sampled and is not collected."""
        self._next: _Launched[ContextT] | None = None
        """The step after it, while `step` runs."""
        self._ending: set[str] = set()
        """Request ids of contexts that end with the open step."""
        self._executes = False
        """Whether the next step runs through `Pipeline.execute`, because a launch has failed."""

    @property
    def has_work(self) -> bool:
        return self._open is not None or super().has_work

    def step(self, num_steps: int = 1) -> dict[str, OutputT]:
        """Launch one batch if any context can run, and collect the batch that was launched before.

        Args:
            num_steps: maximum number of tokens of each context, if a few contexts run several steps in one
                call of `Pipeline.execute`; see `StepLauncher.runs_ahead`. Otherwise a step generates at most
                one token per context.

        Returns:
            The output of each context of the collected batch, by request id. Finished contexts are removed.
        """
        runs_ahead = self._runs_ahead(num_steps)
        if self._open is None and (self._executes or runs_ahead):
            num_steps = 1 if self._executes else num_steps
            self._executes = False
            return super().step(num_steps)
        self._begin_step()
        outputs: dict[str, OutputT] = {}
        size = (0, 0) if self._open is None else (len(self._open.batch), 0)
        if self._open is not None and runs_ahead:
            self.last_batch = size
            return self._collect()
        if self._open is not None and self._steps.collects_first(self._open.step):
            outputs = self._collect()
        if self._open is not None:
            self._ending = self._steps.advance(self._open.step, self._running)
        try:
            batch = self._next_batch(1)
        except _CollectFirst:
            outputs = self._collect()
            batch = self._next_batch(1)
        if batch.entries:
            size = self.last_batch
            self._launch(batch)
        if self._open is not None:
            outputs = self._collect()
        self.last_batch = size  # not (0, 0) if there are outputs, also if no further batch was launched
        self._sample()
        return outputs

    def _runs_ahead(self, num_steps: int) -> bool:
        """Return whether the running contexts run several steps in one call instead of overlapped ones."""
        if num_steps == 1 or self._waiting or self._cancelled or not self._running:
            return False
        entries = self._running.values()
        if len(entries) > _MAX_AHEAD or not all(entry.is_decoding for entry in entries):
            return False
        return self._steps.runs_ahead([entry.context for entry in entries])

    def _run_timed(self, batch: Batch[ContextT]) -> dict[str, OutputT]:
        """Run a batch without recording its duration.

        `StepLimit` also limits overlapped steps, whose durations are not recorded. An estimate from calls of
        a few contexts alone can be wrong for many contexts, and overlapped steps would not correct it.
        """
        return self._run(batch.contexts, batch.num_steps)

    def _launch(self, batch: Batch[ContextT]) -> None:
        """Launch the forward of a batch. If that fails, the next step runs through `Pipeline.execute`."""
        contexts = batch.contexts
        after = None if self._open is None else self._open.step
        try:
            step = self._steps.launch(contexts, after)
        except Exception:
            _LOG.debug("a step could not be launched", exc_info=True)
            self._executes = True
            return
        entries = batch.entries.values()
        prompts = [entry for entry in entries if not entry.is_decoding and is_whole(entry.context)]
        for entry in prompts:
            entry.is_decoding = True
        self._next = _Launched(step, contexts, prompts)

    def _collect(self) -> dict[str, OutputT]:
        """Collect the open step, end the contexts that are done or have failed, and return the outputs."""
        launched, self._open, self._ending = self._open, None, set()
        assert launched is not None
        failures: dict[str, PenstockError]
        try:
            outputs = self._steps.collect(launched.step)
            failures = take_failures(self._pipeline)
        except Exception:
            _LOG.warning("a launched step failed: it runs again", exc_info=True)
            self._drop_next()
            self._release_held(launched)
            return self._run_again(launched)
        self._release_held(launched)
        outputs = {name: output for name, output in outputs.items() if self._runs(name, launched)}
        for name, error in failures.items():
            if self._runs(name, launched):
                self._fail(self._running[name], error)
        self._retire(outputs)
        return outputs

    def _run_again(self, launched: _Launched[ContextT]) -> dict[str, OutputT]:
        """Run the contexts of a failed step that are still running, without overlap."""
        for entry in launched.prompts:
            entry.is_decoding = False
        left = ReservedBatch(
            (name, context)
            for name, context in launched.batch.items()
            if name in launched.sampled and self._runs(name, launched)
        )
        outputs = self._run(left, 1) if left else {}
        self._retire(outputs)
        return outputs

    def _sample(self) -> None:
        """Launch the sampling of the next step, which becomes the open one."""
        if self._next is None:
            return
        try:
            self._next.sampled = frozenset(self._steps.sample(self._next.step))
        except Exception:
            _LOG.debug("a step could not be sampled", exc_info=True)
            self._drop_next()
            self._executes = True
            return
        self._open, self._next = self._next, None

    def _drop_next(self) -> None:
        """Discard a step whose forward was launched. Its contexts compute the same tokens again."""
        if self._next is None:
            return
        dropped, self._next = self._next, None
        self._steps.discard(dropped.step)
        for entry in dropped.prompts:
            entry.is_decoding = False
        self._release_held(dropped)

    def _runs(self, request_id: str, launched: _Launched[ContextT]) -> bool:
        """Return whether a context of a step is still running. It is not if its request was cancelled."""
        entry = self._running.get(request_id)
        return entry is not None and entry.context is launched.batch.get(request_id)

    def _decoding(self) -> list[Entry[ContextT]]:
        return [entry for entry in super()._decoding() if entry.request_id not in self._ending]

    def _check_collected(self) -> None:
        if self._open is not None:
            raise _CollectFirst

    def _release(self, context: ContextT) -> None:
        for launched in (self._next, self._open):
            if launched is not None and launched.batch.get(context.request_id) is context:
                launched.held.append(context)
                return
        super()._release(context)

    def _release_held(self, launched: _Launched[ContextT]) -> None:
        for context in launched.held:
            self._release(context)
        launched.held.clear()
