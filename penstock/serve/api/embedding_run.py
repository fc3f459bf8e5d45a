"""Run the inputs of one HTTP request through an embeddings model.

Each input has its own context. A run submits at most as many contexts at a time as fit into two batches, and
at most half of the worker's ``max_outstanding``, but at least one. A request with many inputs therefore
cannot fill the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from penstock.errors import OverloadedError, PenstockError
from penstock.pipelines.core import EmbeddingsContext, EmbeddingsResponse
from penstock.serve.http.problems import RequestProblem, problem_of
from penstock.serve.http.time_limits import TimeLimits
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services
from penstock.worker.results import Generation

_MAX_SUBMITTED_BATCHES = 2
"""Maximum number of batches of inputs that one request has at the worker: one runs, and one waits."""


class EmbeddingRun:
    """The contexts of one request, in the order of its inputs.

    Args:
        services: the objects that routes use.
        record: receives the number of tokens and the time of admission. Has the client and session ids.
        contexts: the contexts of the inputs.
        names: the request field of each context, such as ``input[3]``, for error messages.
    """

    def __init__(
        self,
        services: Services,
        record: RequestRecord,
        contexts: Sequence[EmbeddingsContext],
        names: Sequence[str],
    ) -> None:
        self._worker = services.worker
        self._record = record
        self._limits = TimeLimits(services.config, record)
        self._contexts = contexts
        self._names = names
        self._generations: dict[int, Generation] = {}
        self._responses: list[EmbeddingsResponse | None] = [None] * len(contexts)
        max_submitted_inputs = min(
            _MAX_SUBMITTED_BATCHES * self._worker.info.max_batch_size, self._worker.max_outstanding // 2
        )
        self._input_ended = asyncio.Event()
        self._submission_permits = asyncio.Semaphore(max(1, max_submitted_inputs))
        self.num_tokens = sum(context.current_length for context in contexts)
        """The total number of tokens of the inputs."""
        record.prompt_tokens = self.num_tokens

    def cancel(self) -> None:
        """Cancel the inputs that are still running. Idempotent."""
        for generation in self._generations.values():
            generation.cancel()

    async def responses(self) -> list[EmbeddingsResponse]:
        """Run all inputs and return the model's outputs in the order of the inputs.

        If one input fails, all other inputs are cancelled.

        Raises:
            PenstockError: the worker is not ready, or the queue is full when the first input is submitted.
            RequestProblem: an input failed; ``param`` names the field. 503 if a time limit is exceeded.
        """
        try:
            await self._limits.within(self._run())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.cancel()
        return [response for response in self._responses if response is not None]

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index, context in enumerate(self._contexts):
                await self._submission_permits.acquire()
                context.client_id = self._record.client_id
                context.session_id = self._record.session_id
                self._generations[index] = await self._submit(context, is_first=index == 0)
                tasks.create_task(self._collect(index))

    async def _submit(self, context: EmbeddingsContext, *, is_first: bool) -> Generation:
        """Submit an input. Inputs other than the first one wait until they may be submitted."""
        if is_first:
            return self._worker.submit(context)
        while True:
            if self._may_submit():
                with suppress(OverloadedError):
                    return self._worker.submit(context)
            await self._wait_until_queue_changes()

    async def _wait_until_queue_changes(self) -> None:
        """Wait until an input of this run or any other request of the worker has ended."""
        self._input_ended.clear()
        input_ended = asyncio.create_task(self._input_ended.wait())
        try:
            await asyncio.wait(
                (input_ended, self._worker.request_ended()), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            input_ended.cancel()

    def _may_submit(self) -> bool:
        """Return whether another input may be submitted now.

        Half of the queue is reserved for the first inputs of requests. Otherwise a request with many inputs
        would fill the queue, and the server would refuse other requests. A run that has no input in the
        worker may always submit one.
        """
        worker = self._worker
        return not self._generations or worker.num_outstanding < worker.max_outstanding // 2

    async def _collect(self, index: int) -> None:
        generation = self._generations[index]
        try:
            await generation.admitted()
            self._record.admitted()
            async for delta in generation:
                if delta.embeddings is not None:
                    self._responses[index] = delta.embeddings
        except PenstockError as error:
            # The semaphore is not released, so that no further input is submitted.
            raise self._problem(index, error) from error
        finally:
            del self._generations[index]
            generation.cancel()
            self._input_ended.set()
        self._submission_permits.release()

    def _problem(self, index: int, error: PenstockError) -> RequestProblem:
        """Return the error of an input as a `RequestProblem`. Its message names one of several inputs."""
        problem, name = problem_of(error), self._names[index]
        prefix = f"{name}: " if len(self._contexts) > 1 else ""
        return RequestProblem(
            problem.status,
            f"{prefix}{problem.message}",
            param=problem.param or name,
            code=problem.code,
            type=problem.type,
            headers=problem.headers,
        )
