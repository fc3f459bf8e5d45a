"""Runs the parts of a text through a speech model and yields one stream of audio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import numpy as np
import numpy.typing as npt

from penstock.pipelines.core import TTSContext
from penstock.serve.http.time_limits import TimeLimits
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services
from penstock.worker.results import Generation


class SpeechRun:
    """Runs the parts of a request's text in order.

    A part starts when the part before it has produced its first audio, or has ended without audio.

    Args:
        services: the objects that routes use.
        record: has the client and session ids. Receives the token counts, the time of admission, the audio
            duration and the finish reason.
        contexts: one context for each part of the text.

    Raises:
        UnavailableError: the worker is not ready, or the queue is full.
    """

    def __init__(self, services: Services, record: RequestRecord, contexts: Sequence[TTSContext]) -> None:
        self._worker = services.worker
        self._record = record
        self._limits = TimeLimits(services.config, record)
        self._ping_seconds = services.config.stream_ping
        self._contexts = contexts
        self._generations: list[Generation] = []
        self._num_tokens_by_part = [0] * len(contexts)
        self._num_cached_by_part = [0] * len(contexts)
        self.is_truncated = False
        """Whether the speech of a part was cut at the maximum length."""
        record.prompt_tokens = sum(len(context.prompt_tokens) for context in contexts)
        self._submit_next()

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's ``usage`` object for speech."""
        prompt_tokens, speech_tokens = self._record.prompt_tokens, sum(self._num_tokens_by_part)
        return {
            "input_tokens": prompt_tokens,
            "output_tokens": speech_tokens,
            "total_tokens": prompt_tokens + speech_tokens,
        }

    def cancel(self) -> None:
        """Cancel the running parts. Idempotent."""
        for generation in self._generations:
            generation.cancel()

    def finish(self) -> None:
        """Cancel the running parts and write the token counts into the request record."""
        self.cancel()
        self._record.completion_tokens = sum(self._num_tokens_by_part)
        self._record.cached_tokens = sum(self._num_cached_by_part)

    async def admitted(self) -> None:
        """Wait until the scheduler has admitted the first part.

        Raises:
            PenstockError: the scheduler refuses the part.
            RequestProblem: 503; the time limit of the request is exceeded.
        """
        await self._limits.within(self._generations[0].admitted())
        self._record.admitted()

    async def chunks(self) -> AsyncGenerator[npt.NDArray[np.float32] | None, None]:
        """Yield the samples when they arrive. Yield None after ``--stream-ping`` seconds without output.

        Raises:
            PenstockError: a part failed, or was refused.
            RequestProblem: 503; a time limit of the server was exceeded.
        """
        try:
            for index in range(len(self._contexts)):
                if index == len(self._generations):
                    self._submit_next()
                generation = self._generations[index]
                deltas = self._limits.with_pings(
                    generation, ping=self._ping_seconds, progress=partial(getattr, generation, "num_unread")
                )
                async with aclosing(deltas):
                    async for delta in deltas:
                        if delta is None:
                            yield None
                            continue
                        self._record.tokens(delta.num_tokens - self._num_tokens_by_part[index], index)
                        self._num_tokens_by_part[index] = max(
                            delta.num_tokens, self._num_tokens_by_part[index]
                        )
                        self._num_cached_by_part[index] = delta.num_cached_tokens
                        self.is_truncated |= delta.status.value == "maximum_length"
                        if delta.audio:
                            if index + 1 == len(self._generations) < len(self._contexts):
                                self._submit_next()
                            samples = np.concatenate(delta.audio)
                            self._record.audio(len(samples) / self._worker.info.sample_rate)
                            yield samples
            self._record.finish_reasons = ["length" if self.is_truncated else "stop"]
        finally:
            self.finish()

    def _submit_next(self) -> None:
        context = self._contexts[len(self._generations)]
        context.client_id = self._record.client_id
        context.session_id = self._record.session_id
        self._generations.append(self._worker.submit(context))
