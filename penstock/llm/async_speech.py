"""`AsyncSpeechMethods`: the methods of `AsyncLLM` for speech models."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.llm.async_runner import AsyncRunner, gather_all
from penstock.llm.speech import Speech, speech_contexts, voice_options
from penstock.pipelines.core import AudioGeneratorOutput, PipelineTask, SamplingParams, TTSContext
from penstock.text.speech_tokenizer import SpeechFields
from penstock.worker.results import RequestDelta

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.text.speech_tokenizer import SpeechTokenizer
    from penstock.worker.engine_client import EngineClient

T = TypeVar("T")


class AsyncSpeechMethods:
    """Methods of `AsyncLLM` that convert texts to speech."""

    if TYPE_CHECKING:
        config: PipelineConfig
        tokenizer: SpeechTokenizer
        _worker: EngineClient
        _runner: AsyncRunner

        def _check_task(self, method: str, task: PipelineTask) -> None: ...

        async def _run_in_pool(self, function: Callable[[], T]) -> T: ...

    async def speak(
        self,
        texts: str | Sequence[str],
        sampling_params: SamplingParams | None = None,
        *,
        voice: str | None = None,
        audio_prompt_tokens: Sequence[int] = (),
        audio_prompt_transcription: str = "",
        adapter: str | None = None,
        priority: int = 0,
    ) -> Any:
        """Return the audio of texts, like `LLM.speak`.

        Args:
            texts: a text, or a list of texts.
            sampling_params: the parameters for all texts.
            voice: the name of a voice.
            audio_prompt_tokens: codes of a voice to imitate.
            audio_prompt_transcription: the transcription of ``audio_prompt_tokens``.
            adapter: the LoRA adapter.
            priority: the priority of all texts; texts with a higher number are scheduled first.

        Returns:
            A `Speech` for a single text, or a list of `Speech` objects in the order of the texts.

        Raises:
            InputError: a text cannot be converted to speech; all other texts are cancelled.
            RequestFailedError: the model generated no speech for a text; all other texts are cancelled.
            TaskMismatchError: the model does not generate audio.
            UnavailableError: the worker process ended during the call, or accepts no requests.
        """
        self._check_task("AsyncLLM.speak", PipelineTask.AUDIO_GENERATION)
        fields = self._speech_fields(
            voice, audio_prompt_tokens, audio_prompt_transcription, adapter, priority
        )
        batch = [texts] if isinstance(texts, str) else list(texts)

        def build() -> list[list[TTSContext]]:
            return [
                speech_contexts(self.config, self.tokenizer, request, sampling_params, fields)
                for request in batch
            ]

        contexts_by_text = await self._run_in_pool(build)
        calls = [partial(self._run_part, context) for contexts in contexts_by_text for context in contexts]
        part_results = iter(await gather_all(calls))
        speeches = [self._join_parts([next(part_results) for _ in contexts]) for contexts in contexts_by_text]
        return speeches[0] if isinstance(texts, str) else speeches

    async def stream_speech(
        self,
        text: str,
        sampling_params: SamplingParams | None = None,
        *,
        voice: str | None = None,
        audio_prompt_tokens: Sequence[int] = (),
        audio_prompt_transcription: str = "",
        adapter: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[AudioGeneratorOutput, None]:
        """Yield the audio of one text in chunks, the first chunk as early as possible.

        See `speak` for the parameters and `LLM.stream_speech` for the chunks. The next part of a long text is
        submitted when the previous part has audio or has ended. Closing the generator cancels the requests of
        all parts.

        Raises:
            InputError: the text cannot be converted to speech.
            RequestFailedError: the model generated no speech.
            TaskMismatchError: the model does not generate audio.
            UnavailableError: the worker process ended during the call, or accepts no requests.
        """
        import torch

        self._check_task("AsyncLLM.stream_speech", PipelineTask.AUDIO_GENERATION)
        fields = self._speech_fields(
            voice, audio_prompt_tokens, audio_prompt_transcription, adapter, priority
        )
        fields["streaming"] = True
        start_time, sample_rate = perf_counter(), self._worker.info.sample_rate
        contexts = await self._run_in_pool(
            lambda: speech_contexts(self.config, self.tokenizer, text, sampling_params, fields)
        )
        num_samples, num_tokens = 0, [0] * len(contexts)
        async with aclosing(self._run_parts(contexts)) as deltas:
            async for index, delta in deltas:
                num_tokens[index] = max(delta.num_tokens, num_tokens[index])
                is_last = delta.status.is_done and index == len(contexts) - 1
                if not delta.audio and not is_last:
                    continue
                chunk = _join_chunks(delta.audio)
                num_samples += len(chunk)
                metadata: dict[str, object] = {
                    "sample_rate": sample_rate,
                    "num_tokens": sum(num_tokens),
                    "seconds": num_samples / sample_rate,
                    "elapsed_seconds": perf_counter() - start_time,
                }
                yield AudioGeneratorOutput(torch.from_numpy(chunk), metadata, is_last)

    async def _run_parts(
        self, contexts: Sequence[TTSContext]
    ) -> AsyncGenerator[tuple[int, RequestDelta], None]:
        """Run the parts of a text in order.

        Each part is submitted when the previous part has audio or has ended.
        """
        generations = [await self._runner.submit(contexts[0])]
        try:
            for index in range(len(contexts)):
                if index == len(generations):
                    generations.append(await self._runner.submit(contexts[index]))
                async for delta in generations[index]:
                    if delta.audio and index + 1 == len(generations) < len(contexts):
                        generations.append(await self._runner.submit(contexts[index + 1]))
                    yield index, delta
        finally:
            for generation in generations:
                generation.cancel()

    async def _run_part(self, context: TTSContext) -> tuple[list[npt.NDArray[np.floating]], int, bool]:
        """Run a part of a text. Return (chunks, number of tokens, whether it reached the maximum length)."""
        generation = await self._runner.submit(context)
        generation.read_at_end()
        chunks, num_tokens, is_cut = [], 0, False
        try:
            async for delta in generation:
                chunks += delta.audio
                num_tokens = max(delta.num_tokens, num_tokens)
                is_cut |= delta.status.value == "maximum_length"
        finally:
            generation.cancel()
        return chunks, num_tokens, is_cut

    def _join_parts(self, parts: Sequence[tuple[list[npt.NDArray[np.floating]], int, bool]]) -> Speech:
        return Speech(
            audio=_join_chunks([chunk for chunks, _, _ in parts for chunk in chunks]),
            sample_rate=self._worker.info.sample_rate,
            num_tokens=sum(count for _, count, _ in parts),
            is_cut=any(is_cut for _, _, is_cut in parts),
        )

    def _speech_fields(
        self,
        voice: str | None,
        codes: Sequence[int],
        transcription: str,
        adapter: str | None,
        priority: int,
    ) -> SpeechFields:
        voices = {voice.name: voice for voice in self._worker.info.voices}
        voice_fields = voice_options(voice, codes, transcription, voices, self.tokenizer.speech_format)
        return {
            **voice_fields,
            "streaming": False,
            "adapter": adapter,
            "cache_salt": None,
            "priority": priority,
        }


def _join_chunks(chunks: Sequence[npt.NDArray[np.floating]]) -> npt.NDArray[np.float32]:
    return np.concatenate(chunks).astype(np.float32, copy=False) if chunks else np.zeros(0, np.float32)
