"""Run the generations of one HTTP request: submission, admission, output, disconnects.

    contexts -> GenerationRun(...) -> admitted() -> deltas() | whole() -> usage()

A `GenerationRun` holds the contexts of one HTTP request: ``n`` choices for each prompt, in OpenAI's order.
Choice ``i`` of prompt ``p`` has index ``p * n + i``.
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

_IMAGE = b'"image'
"""A text that every body with images contains, in each API. A false positive only selects another thread
pool."""


@dataclass(frozen=True)
class GenerationJob:
    """The contexts of one HTTP request and their decoders."""

    contexts: Sequence[TextContext]
    """``n`` per prompt."""
    choices: Sequence[ChoiceDecoder]
    """One per context."""
    n: int

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of all prompts. A prompt counts once, whatever ``n`` is."""
        return sum(len(context.prompt_tokens) for context in self.contexts[:: self.n])


def check_choices(services: Services, num_prompts: int, n: int) -> None:
    """Refuse a request that has too many choices, before their contexts are created.

    Raises:
        RequestProblem: 400 that names the limit.
    """
    capacity, limit = services.worker.max_outstanding, services.config.max_choices_per_request
    count = num_prompts * n
    if limit is not None and count > limit:
        reason = f"a request may have {limit} (--max-choices-per-request)"
    elif count > capacity:
        reason = f"this server accepts {capacity}"
    else:
        return
    each = f"{n} answers" if num_prompts == 1 else f"{num_prompts} prompts with {n} answers each"
    raise RequestProblem(
        400,
        f"the request asks for {each}, but {reason}: send fewer prompts, or a smaller n",
        param="n" if n > 1 else "prompt",
    )


class GenerationRun:
    """The running choices of one request. Leaving the ``async with`` block cancels choices that still run.

    Raises:
        UnavailableError: the worker is not ready, or too many requests are waiting.
        RequestProblem: 400; the request has more choices than the server accepts.
    """

    def __init__(self, services: Services, record: RequestRecord, job: GenerationJob) -> None:
        self.job = job
        self._limits = TimeLimits(services.config, record)
        self._ping = services.config.stream_ping
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
        """Cancel all choices. Idempotent; does nothing for choices that have finished."""
        for generation in self._generations:
            generation.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """Cancel the choices that still run and write the token counts into the record."""
        self.cancel()
        choices = self.job.choices
        self._record.completion_tokens = sum(choice.num_tokens for choice in choices)
        self._record.cached_tokens = self._num_cached_tokens
        self._record.finish_reasons = [choice.finish_reason for choice in choices if choice.finish_reason]

    async def admitted(self) -> None:
        """Wait until every choice has been admitted to the batch.

        Raises:
            PenstockError: the scheduler refuses a choice, or its grammar cannot be compiled.
        """
        for generation in self._generations:
            await self._limits.within(generation.admitted())
            self._record.admitted()

    async def deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta] | None, None]:
        """Yield (index of the choice, delta) as output arrives; None after a pause without output.

        Raises:
            PenstockError: a choice failed; the other choices are cancelled.
            RequestProblem: 503; a time limit of the server was exceeded.
        """
        merged = _Merged(self._generations)
        with closing(merged):
            pauses = self._limits.with_pings(merged, ping=self._ping, progress=merged.num_unread)
            async with aclosing(pauses):
                async for item in pauses:
                    if item is None:
                        yield None
                    elif self._has_output(*item):
                        yield item[0], self._take(*item)
                    if all(choice.is_done for choice in self.job.choices):
                        return  # after a stop string the worker may still be generating

    async def whole(self) -> list[ChoiceDelta]:
        """Wait for all choices to finish and return the whole output of each.

        Raises:
            PenstockError: a choice failed; the other choices are cancelled.
            RequestProblem: 503; a time limit of the server was exceeded.
        """
        pieces: list[list[ChoiceDelta]] = [[] for _ in self._generations]
        async with aclosing(self.deltas()) as deltas:
            async for item in deltas:
                if item is not None:
                    pieces[item[0]].append(item[1])
        return [_joined(parts) for parts in pieces]

    def usage(self) -> Usage:
        """Return OpenAI's ``usage`` of the output so far."""
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
        """Tokens cached before the request. Cache hits on blocks of the first choice are not counted."""
        cached = [choice.num_cached_tokens for choice in self.job.choices]
        return sum(min(cached[start : start + self.job.n]) for start in range(0, len(cached), self.job.n))

    def _has_output(self, index: int, delta: RequestDelta) -> bool:
        # The worker may generate more tokens before it processes the cancellation.
        return bool(delta.token_ids or delta.status.is_done) and not self.job.choices[index].is_done

    def _take(self, index: int, delta: RequestDelta) -> ChoiceDelta:
        choice = self.job.choices[index]
        self._record.tokens(len(delta.token_ids), index)
        choice.num_cached_tokens = delta.num_cached_tokens
        if choice.decodes_at_end:
            self._generations[index].read_at_end()
        piece = choice.take(
            delta.token_ids, delta.status, delta.log_probabilities, delta.prompt_log_probabilities
        )
        if choice.ended_by_text:
            self._generations[index].cancel()
        return piece


class _Merged:
    """Merges the deltas of several generations. A slow reader gets fewer and longer deltas."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._waiting: dict[asyncio.Future[RequestDelta | None], int] = {}
        self._started = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, RequestDelta]:
        if len(self._generations) == 1:
            return 0, await anext(self._generations[0])
        if not self._started:
            self._started = True
            for index in range(len(self._generations)):
                self._wait_for(index)
        while self._waiting:
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            first = min(done, key=self._waiting.__getitem__)
            index = self._waiting.pop(first)
            delta = first.result()
            if delta is not None:
                self._wait_for(index)
                return index, delta
        raise StopAsyncIteration

    def _wait_for(self, index: int) -> None:
        self._waiting[asyncio.ensure_future(anext(self._generations[index], None))] = index

    def num_unread(self) -> int:
        return sum(generation.num_unread for generation in self._generations)

    def close(self) -> None:
        for task in self._waiting:
            task.cancel()


def _joined(parts: Sequence[ChoiceDelta]) -> ChoiceDelta:
    if len(parts) == 1:
        return parts[0]
    return ChoiceDelta(
        [event for part in parts for event in part.events],
        [token for part in parts for token in part.token_ids],
        [score for part in parts for score in part.scores],
        parts[-1].finish_reason if parts else None,
    )


async def in_pool(request: Request, function: Callable[[], T]) -> T:
    """Run a function in the thread pool, off the event loop. The body must have been read."""
    services, body = Services.of(request), await request.body()
    if getattr(services.tokenizer, "reads_images", False) and _IMAGE in body:
        limits = TimeLimits(services.config, RequestRecord.of(request))
        return await limits.within(services.images.run(function))
    return await asyncio.get_running_loop().run_in_executor(services.pool_for(len(body)), function)


class Cancellable(Protocol):
    """Work of a request that can be cancelled."""

    def cancel(self) -> None: ...


async def cancel_on_disconnect(request: Request, run: Cancellable, answer: Callable[[], Awaitable[T]]) -> T:
    """Await the result of `answer`; if the client disconnects first, cancel `run`.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    working = asyncio.ensure_future(answer())
    leaving = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        run.cancel()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))
