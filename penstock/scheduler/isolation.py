"""Who is to blame when a forward fails: the batch is run again by halves until the culprits stand alone.

A batch of eight, c and f at fault; read from top to bottom::

    a b c d e f g h   fails
    a b c d           fails
    a b               runs
    c d               fails
    c                 fails: ends with an error
    d                 runs
    e f g h           fails
    ...                          a, b, d, e, g and h have made their step as if nothing had happened

Where no part of a batch runs, however small, it is not the contexts' fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Generic, TypeVar

from penstock.errors import PenstockError, RequestFailedError
from penstock.host import private_memory
from penstock.pipelines.core import InputContext, Pipeline
from penstock.pipelines.core.interfaces import PipelineOutput

ContextT = TypeVar("ContextT", bound=InputContext)
OutputT = TypeVar("OutputT", bound=PipelineOutput)

FAULT = "the request ended because of an internal error; the server's log shows it"
"""What a user is told of a fault of ours."""

_MAX_FAULTS = 8
"""Contexts that fail alone, before any part of their batch has run, until the search is given up."""


class Isolation(Generic[ContextT, OutputT]):
    """Runs batches of a pipeline so that contexts which make it fail end alone.

    It relies on contexts being unchanged where ``pipeline.execute`` raises.
    """

    def __init__(self, pipeline: Pipeline[ContextT, OutputT]) -> None:
        self._pipeline = pipeline
        self._num_faults = 0  # in a row: since something ran

    def execute(
        self, batch: Mapping[str, ContextT], num_steps: int
    ) -> tuple[dict[str, OutputT], dict[str, PenstockError]]:
        """One step of a batch.

        Returns:
            The outputs of those that ran, and why each of the others did not. A `PenstockError` is the
            context's own; anything else becomes the cause of a `RequestFailedError`.

        Raises:
            Exception: no part of the batch runs, and two or more contexts have failed in a row, in this step
                or since the last one that ran: the fault is not theirs. Or this process has reached its
                limit of private memory. No context has changed.
        """
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
                if private_memory.is_exceeded(error):
                    raise  # smaller parts might run, but little would be left for what comes after them
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
    """What the last ``execute`` left in ``pipeline.failures``, which is empty then."""
    failures = dict(pipeline.failures)
    pipeline.failures.clear()
    return failures


def as_failure(error: Exception) -> PenstockError:
    """What a request ends with because of an error."""
    if isinstance(error, PenstockError):
        return error
    failure = RequestFailedError(FAULT)
    failure.__cause__ = error
    return failure


def _halves(part: Mapping[str, ContextT]) -> list[dict[str, ContextT]]:
    items = iter(part.items())
    return [dict(islice(items, (len(part) + 1) // 2)), dict(items)]
