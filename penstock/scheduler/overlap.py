"""`OverlappedScheduler`: a scheduler that launches a step before it collects the previous step.

A step of the scheduler, with batch n running on the device::

    advance(n) the contexts of n move past the tokens that n samples, whose ids are not known yet
    batch n + 1     is built: decoding contexts of n, and prompts
    launch(n + 1)   the device runs batch n + 1 after batch n
    collect(n)      waits for n, appends its tokens to the contexts, and removes finished contexts
    sample(n + 1)   for the contexts that are still running

If a context ends while a launched step uses its blocks, the blocks are freed when the step is collected or
discarded.

With few contexts, the device takes less time for a step than the host. If the host has no work between steps,
`Pipeline.execute` then runs several steps in one call.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from penstock.errors import PenstockError
from penstock.kv_cache.reservation import ReservedBatch
from penstock.pipelines.core import InputContext, Pipeline
from penstock.pipelines.core.interfaces import PipelineOutput, StepLauncher
from penstock.scheduler.batch import Batch, Entry, computes_last_token
from penstock.scheduler.isolation import take_failures
from penstock.scheduler.scheduler import Scheduler

ContextT = TypeVar("ContextT", bound=InputContext)
OutputT = TypeVar("OutputT", bound=PipelineOutput)

_MAX_CONTEXTS_AHEAD = 8
"""Maximum number of contexts that run several steps in one call. With more contexts the device takes longer
for a step than the host needs to prepare the next step."""

_LOG = logging.getLogger(__name__)


class _CollectFirstError(Exception):
    """Raised if the next batch needs blocks that the sampled step uses. That step must be collected first."""


@dataclass(slots=True, eq=False)
class _LaunchedStep(Generic[ContextT]):
    """A step that has been launched but not collected."""

    step: Any
    batch: ReservedBatch[ContextT]
    completed_prompts: list[Entry[ContextT]]
    """Entries whose prompt ends with this step."""
    sampled_ids: frozenset[str] = frozenset()
    """Request ids of the contexts whose tokens the step samples."""
    pending_releases: list[ContextT] = field(default_factory=list)
    """Contexts that have ended. They are released when the step is collected or discarded."""


class OverlappedScheduler(Scheduler[ContextT, OutputT]):
    """A `Scheduler` that overlaps the host's work for a step with the device's work for the previous step.

    A call of `step` returns the outputs of the step that the previous call launched. If the next batch cannot
    be built without preemption, the running step is collected first. A failed step runs again through
    `Pipeline.execute`, and in halves if it fails again (`Isolation`).

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
        self._sampled_step: _LaunchedStep[ContextT] | None = None
        """The step that has been sampled but not collected."""
        self._launched_step: _LaunchedStep[ContextT] | None = None
        """The step that has been launched but not sampled; None between two calls of `step`."""
        self._ending_request_ids: set[str] = set()
        """Request ids of contexts that end with the sampled step."""
        self._runs_without_overlap = False
        """Whether the next step runs through `Pipeline.execute`, because a launch or a sampling failed."""

    @property
    def has_work(self) -> bool:
        return self._sampled_step is not None or super().has_work

    def step(self, num_steps: int = 1) -> dict[str, OutputT]:
        """Launch one batch if any context can run, and collect the batch of the previous call.

        Args:
            num_steps: maximum number of tokens of each context, if a few contexts run several steps in one
                call of `Pipeline.execute`; see `StepLauncher.can_run_several_steps`. Otherwise a step
                generates at most one token per context.

        Returns:
            The output of each context of the collected batch, or of a batch that ran without overlap, by
            request id. Finished contexts are removed.
        """
        runs_several_steps = self._runs_several_steps(num_steps)
        if self._sampled_step is None and (self._runs_without_overlap or runs_several_steps):
            num_steps = 1 if self._runs_without_overlap else num_steps
            self._runs_without_overlap = False
            return super().step(num_steps)
        self._begin_step()
        outputs: dict[str, OutputT] = {}
        batch_size = (0, 0) if self._sampled_step is None else (len(self._sampled_step.batch), 0)
        if self._sampled_step is not None and runs_several_steps:
            self.last_batch = batch_size
            return self._collect()
        if self._sampled_step is not None and self._steps.collects_first(self._sampled_step.step):
            outputs = self._collect()
        if self._sampled_step is not None:
            self._ending_request_ids = self._steps.advance(self._sampled_step.step, self._running)
        try:
            batch = self._next_batch(1)
        except _CollectFirstError:
            outputs = self._collect()
            batch = self._next_batch(1)
        if batch.entries:
            batch_size = self.last_batch
            self._launch(batch)
        if self._sampled_step is not None:
            outputs = self._collect()
        self.last_batch = batch_size  # (0, 0) only if there are no outputs
        self._sample()
        return outputs

    def _runs_several_steps(self, num_steps: int) -> bool:
        """Return whether the running contexts run several steps in one call, without overlap."""
        if num_steps == 1 or self._waiting or self._cancelled or not self._running:
            return False
        entries = self._running.values()
        if len(entries) > _MAX_CONTEXTS_AHEAD or not all(entry.is_decoding for entry in entries):
            return False
        return self._steps.can_run_several_steps([entry.context for entry in entries])

    def _run_timed(self, batch: Batch[ContextT]) -> dict[str, OutputT]:
        """Run a batch without recording its duration.

        `StepLimit` also limits overlapped steps, whose durations are not recorded. An estimate from steps
        without overlap, which have few contexts, can be wrong for many contexts, and no recorded step would
        correct the estimate.
        """
        return self._run(batch.contexts, batch.num_steps)

    def _launch(self, batch: Batch[ContextT]) -> None:
        """Launch the forward of a batch. If the launch fails, the next step runs without overlap."""
        contexts = batch.contexts
        previous_step = None if self._sampled_step is None else self._sampled_step.step
        try:
            step = self._steps.launch(contexts, previous_step)
        except Exception:
            _LOG.debug("a step could not be launched", exc_info=True)
            self._runs_without_overlap = True
            return
        entries = batch.entries.values()
        prompts = [entry for entry in entries if not entry.is_decoding and computes_last_token(entry.context)]
        for entry in prompts:
            entry.is_decoding = True
        self._launched_step = _LaunchedStep(step, contexts, prompts)

    def _collect(self) -> dict[str, OutputT]:
        """Collect the sampled step, remove its finished and failed contexts, and return the outputs."""
        step, self._sampled_step, self._ending_request_ids = self._sampled_step, None, set()
        assert step is not None
        failures: dict[str, PenstockError]
        try:
            outputs = self._steps.collect(step.step)
            failures = take_failures(self._pipeline)
        except Exception:
            _LOG.warning("a launched step failed: it runs again", exc_info=True)
            self._discard_launched()
            self._release_pending(step)
            return self._run_again(step)
        self._release_pending(step)
        outputs = {
            request_id: output
            for request_id, output in outputs.items()
            if self._is_still_running(request_id, step)
        }
        for request_id, error in failures.items():
            if self._is_still_running(request_id, step):
                self._fail(self._running[request_id], error)
        self._retire(outputs)
        return outputs

    def _run_again(self, launched: _LaunchedStep[ContextT]) -> dict[str, OutputT]:
        """Run a failed step again without overlap, with its sampled contexts that are still running."""
        for entry in launched.completed_prompts:
            entry.is_decoding = False
        # A plain dict: the pipeline reserves again, because recurrent states may be ahead of the contexts.
        remaining_contexts = {
            request_id: context
            for request_id, context in launched.batch.items()
            if request_id in launched.sampled_ids and self._is_still_running(request_id, launched)
        }
        outputs = self._run(remaining_contexts, 1) if remaining_contexts else {}
        self._retire(outputs)
        return outputs

    def _sample(self) -> None:
        """Launch the sampling of the launched step, which becomes the sampled step."""
        if self._launched_step is None:
            return
        try:
            self._launched_step.sampled_ids = frozenset(self._steps.sample(self._launched_step.step))
        except Exception:
            _LOG.debug("a step could not be sampled", exc_info=True)
            self._discard_launched()
            self._runs_without_overlap = True
            return
        self._sampled_step, self._launched_step = self._launched_step, None

    def _discard_launched(self) -> None:
        """Discard the launched step. A later step computes the same tokens again."""
        if self._launched_step is None:
            return
        discarded_step, self._launched_step = self._launched_step, None
        self._steps.discard(discarded_step.step)
        for entry in discarded_step.completed_prompts:
            entry.is_decoding = False
        self._release_pending(discarded_step)

    def _is_still_running(self, request_id: str, launched: _LaunchedStep[ContextT]) -> bool:
        """Return whether a context of a launched step is still running: not finished, failed or cancelled."""
        entry = self._running.get(request_id)
        return entry is not None and entry.context is launched.batch.get(request_id)

    def _decoding_entries(self) -> list[Entry[ContextT]]:
        return [
            entry for entry in super()._decoding_entries() if entry.request_id not in self._ending_request_ids
        ]

    def _check_collected(self) -> None:
        if self._sampled_step is not None:
            raise _CollectFirstError

    def _release(self, context: ContextT) -> None:
        for launched in (self._launched_step, self._sampled_step):
            if launched is not None and launched.batch.get(context.request_id) is context:
                launched.pending_releases.append(context)
                return
        super()._release(context)

    def _release_pending(self, launched: _LaunchedStep[ContextT]) -> None:
        for context in launched.pending_releases:
            self._release(context)
        launched.pending_releases.clear()
