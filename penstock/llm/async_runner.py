"""Runs contexts through an engine client, for `AsyncLLM`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import TypeVar

from penstock.errors import OverloadedError
from penstock.llm.outputs import OutputBuilder
from penstock.pipelines.core import RequestContext, TextGenerationResponse, TextResponse
from penstock.worker.engine_client import EngineClient
from penstock.worker.messages import PackedLogProbabilities
from penstock.worker.results import Generation, RequestDelta

T = TypeVar("T")


class AsyncRunner:
    """Runs contexts through an engine client. Waits while the queue of the engine is full.

    Args:
        worker: the engine client.
    """

    def __init__(self, worker: EngineClient) -> None:
        self._worker = worker
        self._submit_lock = asyncio.Lock()

    async def submit(self, context: RequestContext) -> Generation:
        """Submit a context. Wait while the queue of the engine is full."""
        async with self._submit_lock:
            while True:
                try:
                    return self._worker.submit(context)
                except OverloadedError:
                    await self._worker.request_ended()

    async def deltas(self, builder: OutputBuilder) -> AsyncGenerator[RequestDelta, None]:
        """Run the context of a builder. Yield each delta after the builder has taken it.

        The request is cancelled when the builder is done or when the generator is closed.
        """
        generation = await self.submit(builder.context)
        try:
            async for delta in generation:
                builder.take(_as_response(delta, builder))
                yield delta
                if builder.is_done:
                    return
        finally:
            generation.cancel()


async def gather_all(calls: Sequence[Callable[[], Coroutine[None, None, T]]]) -> list[T]:
    """Run calls concurrently and return their results in order.

    The first error cancels the other calls and is raised.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks_in_order = [tasks.create_task(call()) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks_in_order]


def _as_response(delta: RequestDelta, builder: OutputBuilder) -> TextGenerationResponse:
    """Convert a delta to the response of a pipeline, which the builder expects.

    A pipeline's response has no prompt log probabilities. They are passed to the builder directly.
    """
    packed_rows: list[PackedLogProbabilities | None] = [*delta.log_probabilities]
    packed_rows += [None] * (len(delta.token_ids) - len(packed_rows))
    if delta.prompt_log_probabilities is not None:  # can come before the first output token
        builder.take_prompt_log_probabilities(delta.prompt_log_probabilities.unpack())
    tokens = [
        TextResponse(token, None if packed_row is None else packed_row.unpack())
        for token, packed_row in zip(delta.token_ids, packed_rows, strict=True)
    ]
    return TextGenerationResponse(tokens, delta.status)
