"""Fault isolation by bisection: a failed batch runs again in halves until the failing requests are found.

Example: a batch of eight contexts (requests) in which c and f fail. The lines are in order of time::

    a b c d e f g h   fails
    a b c d           fails
    a b               runs
    c d               fails
    c                 fails: ends with an error
    d                 runs
    e f g h           fails
    ...                          a, b, d, e, g and h have completed their step

If no part of a batch runs and two or more contexts have failed with an exception other than `PenstockError`,
`Isolation` assumes that no single context is the cause, and raises the exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Generic, TypeVar

from penstock.errors import PenstockError, RankFailedError, RequestFailedError
from penstock.host import private_memory
from penstock.pipelines.core import InputContext, Pipeline
from penstock.pipelines.core.interfaces import PipelineOutput

ContextT = TypeVar("ContextT", bound=InputContext)
OutputT = TypeVar("OutputT", bound=PipelineOutput)

FAULT_MESSAGE = "the request ended because of an internal error; the server's log shows it"
"""Error message of a request that ended because of an internal error."""

_MAX_FAULTS = 8
"""The search stops after this number of internal errors since a part of a batch last ran."""


class Isolation(Generic[ContextT, OutputT]):
    """Runs batches of a pipeline, and finds the contexts that make a batch fail.

    When ``pipeline.execute`` raises, the contexts must be unchanged.

    Args:
        pipeline: executes the batches.
        is_enabled: whether a failed batch runs again in halves. If not, `execute` raises every exception.
    """

    def __init__(self, pipeline: Pipeline[ContextT, OutputT], *, is_enabled: bool = True) -> None:
        self._pipeline = pipeline
        self._is_enabled = is_enabled
        # Number of contexts that failed with an exception other than `PenstockError` since a part of a batch
        # last ran successfully.
        self._num_faults = 0

    def execute(
        self, batch: Mapping[str, ContextT], num_steps: int
    ) -> tuple[dict[str, OutputT], dict[str, PenstockError]]:
        """Run up to ``num_steps`` steps of a batch.

        Returns:
            The outputs of the contexts that ran, and the errors of the contexts that failed. A
            `PenstockError` is returned unchanged. Any other exception becomes the ``__cause__`` of a
            `RequestFailedError`.

        Raises:
            RankFailedError: a process of the model has ended or does not respond.
            Exception: isolation is not enabled, this process has reached its limit of private memory, or no
                part of the batch runs and two or more contexts have failed with an exception other than
                `PenstockError` since a part of a batch last succeeded. Contexts are unchanged, except those
                of parts that ran before the memory limit was reached.
        """
        if not self._is_enabled:
            return self._pipeline.execute(batch, num_steps), take_failures(self._pipeline)
        outputs: dict[str, OutputT] = {}
        failures: dict[str, PenstockError] = {}
        has_run, num_faults = False, self._num_faults
        parts = [batch]
        while parts:
            part = parts.pop()
            try:
                outputs |= self._pipeline.execute(part, num_steps)
            except Exception as error:
                self._pipeline.failures.clear()
                if isinstance(error, RankFailedError):
                    raise  # no part of the batch can run without all processes of the model
                if private_memory.is_exceeded(error):
                    raise  # smaller parts might run, but later steps would not have enough memory
                if len(part) > 1:
                    parts += _halves(part)[::-1]
                    continue
                failures |= dict.fromkeys(part, as_failure(error))
                num_faults += not isinstance(error, PenstockError)
                self._num_faults = num_faults
                if not has_run and (num_faults >= _MAX_FAULTS or (num_faults > 1 and not parts)):
                    raise
            else:
                has_run = True
                failures |= take_failures(self._pipeline)
        self._num_faults = 0 if has_run else num_faults
        return outputs, failures


def take_failures(pipeline: Pipeline[ContextT, OutputT]) -> dict[str, PenstockError]:
    """Return the failures of the last ``execute`` and clear ``pipeline.failures``."""
    failures = dict(pipeline.failures)
    pipeline.failures.clear()
    return failures


def as_failure(error: Exception) -> PenstockError:
    """Return the error that ends a request because of an exception."""
    if isinstance(error, PenstockError):
        return error
    failure = RequestFailedError(FAULT_MESSAGE)
    failure.__cause__ = error
    return failure


def _halves(batch: Mapping[str, ContextT]) -> list[dict[str, ContextT]]:
    items = iter(batch.items())
    return [dict(islice(items, (len(batch) + 1) // 2)), dict(items)]
