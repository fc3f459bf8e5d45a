"""From contexts to what came of them: submission, admission, deltas, disconnects.

    contexts -> GenerationRun(...) -> admitted() -> deltas() | whole() -> usage()

A `GenerationRun` holds the contexts of one HTTP request: ``n`` choices for each of its prompts in OpenAI's
order, choice ``i`` of prompt ``p`` at ``p * n + i``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from penstock.pipelines.core import TextContext
from penstock.serve.api.choice_decoder import ChoiceDecoder, ChoiceDelta
from penstock.serve.http.problems import RequestProblem
from penstock.serve.http.sse import wait_for_disconnect
from penstock.serve.http.time_limits import TimeLimits
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services
from penstock.worker.results import Generation, RequestDelta

T = TypeVar("T")


@dataclass(frozen=True)
class GenerationJob:
    """What one HTTP request runs."""

    contexts: Sequence[TextContext]
    """``n`` for each prompt."""
    choices: Sequence[ChoiceDecoder]
    """One a context."""
    n: int

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once, however many choices answer it."""
        return sum(len(context.prompt_tokens) for context in self.contexts[:: self.n])


def check_choices(services: Services, num_prompts: int, n: int) -> None:
    """Refuses a request for more choices than one may have, before their contexts take memory.

    Raises:
        RequestProblem: 400 that names the limit.
    """
    room, limit = services.worker.max_outstanding, services.config.max_choices_per_request
    count = num_prompts * n
    if limit is not None and count > limit:
        reason = f"a request may have {limit} (--max-choices-per-request)"
    elif count > room:
        reason = f"this server takes {room}"
    else:
        return
    each = f"{n} answers" if num_prompts == 1 else f"{num_prompts} prompts with {n} answers each"
    raise RequestProblem(
        400,
        f"the request asks for {each}, but {reason}: send fewer prompts, or a smaller n",
        param="n" if n > 1 else "prompt",
    )


class GenerationRun:
    """The choices of one request, at the worker. Leaving it (``async with``) cancels what still runs.

    Raises:
        UnavailableError: the worker is not ready, or too many requests wait already.
        RequestProblem: 400; more choices than the server takes in at all.
    """

    def __init__(self, services: Services, record: RequestRecord, work: GenerationJob) -> None:
        self.work = work
        self._limits = TimeLimits(services.config, record)
        self._ping = services.config.stream_ping
        self._num_prompt_tokens = work.num_prompt_tokens
        self._record = record
        self._generations: list[Generation] = []
        check_choices(services, len(work.contexts) // work.n, work.n)
        record.prompt_tokens = self._num_prompt_tokens
        try:
            for context in work.contexts:
                context.client_id = record.client_id
                self._generations.append(services.worker.submit(context))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ends all choices; twice is once, and after the end nothing."""
        for generation in self._generations:
            generation.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """Cancels what still runs, and tells the record how far it came."""
        self.cancel()
        choices = self.work.choices
        self._record.completion_tokens = sum(choice.num_tokens for choice in choices)
        self._record.cached_tokens = self._num_cached_tokens
        self._record.finish_reasons = [choice.finish_reason for choice in choices if choice.finish_reason]

    async def admitted(self) -> None:
        """Returns when every choice has a place in the batch, or has had one.

        Raises:
            PenstockError: the scheduler refuses one, or its grammar cannot be compiled.
        """
        for generation in self._generations:
            await self._limits.within(generation.admitted())
            self._record.admitted()

    async def deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta] | None, None]:
        """What each choice gains, as it comes, with the choice's index; None where nothing came for a while.

        Raises:
            PenstockError: a choice has failed; the others are cancelled.
            RequestProblem: 503; the server's time limits.
        """
        merged = _Merged(self._generations)
        with closing(merged):
            pauses = self._limits.with_pings(merged, ping=self._ping, progress=merged.num_unread)
            async with aclosing(pauses):
                async for item in pauses:
                    if item is None:
                        yield None
                    elif self._adds_something(*item):
                        yield item[0], self._take(*item)
                    if all(choice.is_done for choice in self.work.choices):
                        return  # where a stop string ended the last, the worker may not know yet

    async def whole(self) -> list[ChoiceDelta]:
        """All that came of each choice, once it has ended.

        Raises:
            PenstockError: a choice has failed; the others are cancelled.
            RequestProblem: 503; the server's time limits.
        """
        pieces: list[list[ChoiceDelta]] = [[] for _ in self._generations]
        async with aclosing(self.deltas()) as deltas:
            async for item in deltas:
                if item is not None:
                    pieces[item[0]].append(item[1])
        return [_joined(parts) for parts in pieces]

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage``, of what has come so far."""
        choices = self.work.choices
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
        """Of each prompt what was there before the request: later choices find what the first computed."""
        cached = [choice.num_cached_tokens for choice in self.work.choices]
        return sum(min(cached[start : start + self.work.n]) for start in range(0, len(cached), self.work.n))

    def _adds_something(self, index: int, delta: RequestDelta) -> bool:
        # The worker may go on with a choice that a stop string ended until it hears of that.
        return bool(delta.token_ids or delta.status.is_done) and not self.work.choices[index].is_done

    def _take(self, index: int, delta: RequestDelta) -> ChoiceDelta:
        choice = self.work.choices[index]
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
    """The deltas of several generations, as they come. Who reads slowly gets fewer and longer ones."""

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
    """Runs what would hold the event loop up: templates, tokenising, schemas. The body has been read."""
    pool = Services.of(request).pool_for(len(await request.body()))
    return await asyncio.get_running_loop().run_in_executor(pool, function)


async def cancel_on_disconnect(request: Request, run: GenerationRun, answer: Callable[[], Any]) -> Any:
    """Awaits an answer; where the client leaves first, all of its choices are cancelled at once.

    Raises:
        ClientDisconnect: nobody is there to be answered.
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
