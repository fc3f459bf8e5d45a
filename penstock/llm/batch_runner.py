"""Runs the contexts of one `LLM` call to their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from penstock.errors import InputError, UnsupportedFeatureError
from penstock.host.interrupts import deferred_interrupts
from penstock.pipelines.core import TextContext
from penstock.pipelines.task_pipeline import AnyTaskPipeline
from penstock.scheduler import AnyScheduler

_POLL_INTERVAL = 0.001
"""Seconds between two scheduler steps while no context is ready, such as during grammar compilation."""


class ResultBuilder(Protocol):
    """Collects the outputs of one context."""

    @property
    def context(self) -> TextContext:
        """The context."""

    @property
    def is_done(self) -> bool:
        """Whether the result is complete.

        After a stop string the result is complete, although the context still runs.
        """

    def take(self, response: Any, /) -> None:
        """Add the output of one scheduler step."""


BuilderT = TypeVar("BuilderT", bound=ResultBuilder)


class BatchRunner:
    """Submits contexts to a scheduler and calls its `step`. Only one thread at a time may use the runner.

    Args:
        pipeline: executes the batches.
        scheduler: the pipeline's scheduler.
    """

    def __init__(self, pipeline: AnyTaskPipeline, scheduler: AnyScheduler) -> None:
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a call is running, or a stream is open."""
        return self._lock.locked()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Reject other calls during the block.

        Two threads that run kernels at the same time are three times slower than one.

        Raises:
            UnsupportedFeatureError: another call is running, or a stream is open.
            InputError: the LLM is closed.
        """
        if not self._lock.acquire(blocking=False):
            raise UnsupportedFeatureError(
                "using one LLM in two calls at the same time",
                "finish or close its open stream first, and call it from one thread: "
                "a list of prompts runs as one batch",
            )
        try:
            if self._is_closed:
                raise InputError("this LLM is closed: make a new one")
            yield
        finally:
            self._lock.release()

    def close(self) -> None:
        """Drop the references to the pipeline and the scheduler. Later calls raise `InputError`."""
        self._is_closed = True
        del self._pipeline, self._scheduler

    def run(self, builders: Sequence[BuilderT], *, seconds: float) -> Iterator[list[BuilderT]]:
        """Run contexts to completion. After each scheduler call, yield the builders that received output.

        A yielded list can be empty. A scheduler call takes about ``seconds``, or the time of one step if a
        step takes longer.

        Raises:
            PenstockError: a context failed. The remaining contexts are cancelled.
        """
        running = {builder.context.request_id: builder for builder in builders}
        try:
            with deferred_interrupts():
                for builder in builders:
                    self._scheduler.submit(builder.context)
            while running:
                with deferred_interrupts():
                    responses = self._scheduler.step(self._pipeline.num_steps_for(seconds))
                for failure in self._scheduler.failures.values():
                    raise failure
                updated_builders = [running[request_id] for request_id in responses]
                for builder, response in zip(updated_builders, responses.values(), strict=True):
                    builder.take(response)
                    if builder.is_done:
                        del running[builder.context.request_id]
                        if not response.is_done:  # a stop string, which the scheduler does not see
                            self._scheduler.cancel(builder.context.request_id)
                yield updated_builders
                if not updated_builders and not self._scheduler.last_batch[0]:
                    time.sleep(_POLL_INTERVAL)
        finally:
            with deferred_interrupts():
                self._cancel(running)

    def _cancel(self, request_ids: Iterable[str]) -> None:
        """Cancel the contexts that still run, so that the next call starts with an empty scheduler."""
        for request_id in request_ids:
            self._scheduler.cancel(request_id)
        self._scheduler.failures.clear()
        if self._scheduler.has_work:
            self._scheduler.step()  # a step without contexts applies the cancellations
        assert not self._scheduler.has_work, "contexts remain after a cancellation"
