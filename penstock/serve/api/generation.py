"""Run the contexts of one HTTP request: submit them, wait for admission, yield output, handle disconnects.

    contexts -> GenerationRun(...) -> admitted() -> deltas() | whole_output() -> usage()

A `GenerationRun` has ``n`` choices for each prompt of the request, in OpenAI's order. Choice ``i`` of prompt
``p`` has index ``p * n + i``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from penstock.pipelines.core import TextContext
from penstock.serve.api.choice_decoder import ChoiceDecoder, ChoiceDelta
from penstock.serve.api.usage import Usage
from penstock.serve.http.problems import RequestProblem
from penstock.serve.http.sse import wait_for_disconnect
from penstock.serve.http.time_limits import TimeLimits
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services
from penstock.worker.results import Generation, RequestDelta

T = TypeVar("T")

_IMAGE_KEY = b'"image'
"""Bytes that the body of every request with images contains, in all APIs.

Requests whose bodies contain these bytes are prepared in the thread pool for images. The body of a request
without images may contain them, too.
"""


@dataclass(frozen=True)
class GenerationJob:
    """The contexts of one HTTP request and their decoders."""

    contexts: Sequence[TextContext]
    """``n`` contexts per prompt."""
    choices: Sequence[ChoiceDecoder]
    """One decoder per context."""
    n: int
    """The number of choices per prompt."""

    @property
    def num_prompt_tokens(self) -> int:
        """The total number of prompt tokens. A prompt counts once, not once for each of its ``n`` choices."""
        return sum(len(context.prompt_tokens) for context in self.contexts[:: self.n])


def check_choices(services: Services, num_prompts: int, n: int) -> None:
    """Raise if a request has too many choices. Call it before creating the contexts of the choices.

    Raises:
        RequestProblem: 400; the message names the limit.
    """
    capacity, limit = services.worker.max_outstanding, services.config.max_choices_per_request
    num_choices = num_prompts * n
    if limit is not None and num_choices > limit:
        reason = f"a request may have {limit} (--max-choices-per-request)"
    elif num_choices > capacity:
        reason = f"this server accepts {capacity}"
    else:
        return
    requested_choices = f"{n} choices" if num_prompts == 1 else f"{num_prompts} prompts with {n} choices each"
    raise RequestProblem(
        400,
        f"the request has {requested_choices}, but {reason}: send fewer prompts, or a smaller n",
        param="n" if n > 1 else "prompt",
    )


class GenerationRun:
    """The running choices of one request.

    The end of the ``async with`` block cancels the choices that still run.

    Args:
        services: the objects that routes use.
        record: has the client and session ids. Receives the token counts, times and finish reasons.
        job: the contexts and decoders of the choices.

    Raises:
        UnavailableError: the worker is not ready, or the queue is full.
        RequestProblem: 400; the request has more choices than the server accepts.
    """

    def __init__(self, services: Services, record: RequestRecord, job: GenerationJob) -> None:
        self.job = job
        self._limits = TimeLimits(services.config, record)
        self._ping_seconds = services.config.stream_ping
        self._num_prompt_tokens = job.num_prompt_tokens
        self._record = record
        self._generations: list[Generation] = []
        check_choices(services, len(job.contexts) // job.n, job.n)
        record.prompt_tokens = self._num_prompt_tokens
        try:
            for context in job.contexts:
                context.client_id = record.client_id
                context.session_id = record.session_id
                self._generations.append(services.worker.submit(context))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel all choices that have not finished. Idempotent."""
        for generation in self._generations:
            generation.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """Cancel running choices and write the token counts and finish reasons into the request record."""
        self.cancel()
        choices = self.job.choices
        self._record.completion_tokens = sum(choice.num_tokens for choice in choices)
        self._record.cached_tokens = self._num_cached_tokens
        self._record.finish_reasons = [choice.finish_reason for choice in choices if choice.finish_reason]

    async def admitted(self) -> None:
        """Wait until the scheduler has admitted every choice.

        Raises:
            PenstockError: the scheduler refuses a choice, or its grammar cannot be compiled.
            RequestProblem: 503; the time limit of the request was exceeded.
        """
        for generation in self._generations:
            await self._limits.within(generation.admitted())
            self._record.admitted()

    async def deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta] | None, None]:
        """Yield (index of the choice, delta) when output arrives.

        Yields None after ``--stream-ping`` seconds without output.

        Raises:
            PenstockError: a choice failed.
            RequestProblem: 503; a time limit of the server was exceeded.
        """
        merged_deltas = _MergedDeltas(self._generations)
        with closing(merged_deltas):
            deltas_and_pings = self._limits.with_pings(
                merged_deltas, ping=self._ping_seconds, progress=merged_deltas.num_unread
            )
            async with aclosing(deltas_and_pings):
                async for item in deltas_and_pings:
                    if item is None:
                        yield None
                    elif self._has_output(*item):
                        yield item[0], self._take(*item)
                    if all(choice.is_done for choice in self.job.choices):
                        return  # the worker may still be generating after a stop string

    async def whole_output(self) -> list[ChoiceDelta]:
        """Wait for all choices to finish and return the whole output of each.

        Raises:
            PenstockError: a choice failed.
            RequestProblem: 503; a time limit of the server was exceeded.
        """
        deltas_by_choice: list[list[ChoiceDelta]] = [[] for _ in self._generations]
        async with aclosing(self.deltas()) as deltas:
            async for item in deltas:
                if item is not None:
                    deltas_by_choice[item[0]].append(item[1])
        return [_joined_delta(choice_deltas) for choice_deltas in deltas_by_choice]

    def usage(self) -> Usage:
        """Return OpenAI's ``usage`` object for the output so far."""
        choices = self.job.choices
        prompt = self._num_prompt_tokens
        completion = sum(choice.num_tokens for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices)
            },
        }

    @property
    def _num_cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache, without hits between choices of the same prompt.

        The later choices of a prompt also find KV blocks that the first choice has stored. The minimum over
        the choices of a prompt excludes these cache hits.
        """
        cached_counts = [choice.num_cached_tokens for choice in self.job.choices]
        return sum(
            min(cached_counts[start : start + self.job.n])
            for start in range(0, len(cached_counts), self.job.n)
        )

    def _has_output(self, index: int, delta: RequestDelta) -> bool:
        # Tokens can arrive after the end of a choice, until the worker has processed the cancellation.
        return bool(delta.token_ids or delta.status.is_done) and not self.job.choices[index].is_done

    def _take(self, index: int, delta: RequestDelta) -> ChoiceDelta:
        choice = self.job.choices[index]
        self._record.tokens(len(delta.token_ids), index)
        choice.num_cached_tokens = delta.num_cached_tokens
        if choice.decodes_at_end:
            self._generations[index].read_at_end()
        choice_delta = choice.take(
            delta.token_ids, delta.status, delta.log_probabilities, delta.prompt_log_probabilities
        )
        if choice.ended_by_text:
            self._generations[index].cancel()
        return choice_delta


class _MergedDeltas:
    """Async iterator over the deltas of several generations, as pairs (index of the generation, delta)."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._pending_deltas: dict[asyncio.Future[RequestDelta | None], int] = {}
        self._is_started = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, RequestDelta]:
        if len(self._generations) == 1:
            return 0, await anext(self._generations[0])
        if not self._is_started:
            self._is_started = True
            for index in range(len(self._generations)):
                self._wait_for(index)
        while self._pending_deltas:
            finished_tasks, _ = await asyncio.wait(self._pending_deltas, return_when=asyncio.FIRST_COMPLETED)
            finished_task = min(finished_tasks, key=self._pending_deltas.__getitem__)
            index = self._pending_deltas.pop(finished_task)
            delta = finished_task.result()
            if delta is not None:
                self._wait_for(index)
                return index, delta
        raise StopAsyncIteration

    def _wait_for(self, index: int) -> None:
        self._pending_deltas[asyncio.ensure_future(anext(self._generations[index], None))] = index

    def num_unread(self) -> int:
        return sum(generation.num_unread for generation in self._generations)

    def close(self) -> None:
        for task in self._pending_deltas:
            task.cancel()


def _joined_delta(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Return a delta with the events, tokens and scores of all deltas of one choice."""
    if len(deltas) == 1:
        return deltas[0]
    return ChoiceDelta(
        [event for delta in deltas for event in delta.events],
        [token for delta in deltas for token in delta.token_ids],
        [score for delta in deltas for score in delta.scores],
        deltas[-1].finish_reason if deltas else None,
        sum(delta.num_tokens for delta in deltas),
    )


async def run_in_pool(request: Request, function: Callable[[], T]) -> T:
    """Run a blocking function for a request in a thread pool, and return its result.

    If the model reads images and the body may have images, the function runs in the thread pool for images.
    Otherwise, the size of the body determines the pool.

    Raises:
        OverloadedError: the body may have images, and too many such requests are being prepared.
        RequestProblem: 503; the body may have images, and the request exceeded its time limit.
    """
    services, body = Services.of(request), await request.body()
    if getattr(services.tokenizer, "reads_images", False) and _IMAGE_KEY in body:
        limits = TimeLimits(services.config, RequestRecord.of(request))
        return await limits.within(services.images.run(function))
    return await asyncio.get_running_loop().run_in_executor(services.pool_for(len(body)), function)


class Cancellable(Protocol):
    """A computation that can be cancelled."""

    def cancel(self) -> None: ...


async def cancel_on_disconnect(request: Request, run: Cancellable, compute: Callable[[], Awaitable[T]]) -> T:
    """Await and return the result of `compute`. Cancel `run` if the client disconnects first.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    result_task = asyncio.ensure_future(compute())
    disconnect_task = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((result_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if result_task.done():
            return result_task.result()
        run.cancel()
        raise ClientDisconnect
    finally:
        result_task.cancel()
        disconnect_task.cancel()
        await asyncio.wait((result_task, disconnect_task))
