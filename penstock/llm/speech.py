"""`SpeechMethods`: the methods of `LLM` for speech models."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from penstock.assembly import STREAMING_LATENCY_BUDGET
from penstock.errors import InputError
from penstock.host.interrupts import deferred_interrupts
from penstock.host.progress import GenerationProgress
from penstock.llm.text_requests import BATCH_LATENCY_BUDGET
from penstock.pipelines.core import (
    AudioGenerationRequest,
    AudioGenerationResponse,
    AudioGeneratorOutput,
    PipelineTask,
    SamplingParams,
    TTSContext,
    VoicePrompt,
)
from penstock.text.speech_tokenizer import SpeechFields, VoiceFields, voice_fields

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.llm.batch_runner import BatchRunner
    from penstock.pipelines.audio import AudioGeneratorPipeline
    from penstock.text.speech_format import SpeechFormat
    from penstock.text.speech_tokenizer import SpeechTokenizer


@dataclass(frozen=True)
class Speech:
    """The audio of one text."""

    audio: npt.NDArray[np.float32]
    """``[S]`` samples from -1 to 1."""
    sample_rate: int
    """Samples per second."""
    num_tokens: int
    """The number of generated tokens."""
    is_cut: bool
    """Whether a part of the text reached the maximum length before its end."""

    @property
    def seconds(self) -> float:
        """The duration of the audio in seconds."""
        return len(self.audio) / self.sample_rate


class SpeechResult:
    """Collects the audio of one context.

    Args:
        context: the context.
    """

    def __init__(self, context: TTSContext) -> None:
        self.context = context
        self.chunks: list[npt.NDArray[np.floating]] = []
        self.new_chunk: npt.NDArray[np.floating] | None = None
        """The audio of the last step; None if it has no audio, or after a stream has yielded it."""
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether all audio has arrived."""
        return self._is_done

    def take(self, response: AudioGenerationResponse) -> None:
        """Add the audio of a step."""
        self.new_chunk = response.audio
        if response.audio is not None:
            self.chunks.append(response.audio)
        self._is_done = response.is_done


class SpeechStream(Iterator[AudioGeneratorOutput]):
    """The audio of one text as a stream of chunks. ``is_done`` is True in the last chunk."""

    def __init__(self, chunks: Generator[AudioGeneratorOutput, None, None], sample_rate: int) -> None:
        self._chunks = chunks
        self.sample_rate = sample_rate
        """Samples per second."""

    def __next__(self) -> AudioGeneratorOutput:
        return next(self._chunks)

    def close(self) -> None:
        """Cancel the request. Does nothing if the stream has ended."""
        self._chunks.close()


def voice_options(
    voice: str | None,
    codes: Sequence[int],
    transcription: str,
    voices: Mapping[str, VoicePrompt],
    speech_format: SpeechFormat,
) -> VoiceFields:
    """Return the request fields that select a voice.

    Args:
        voice: the name of a voice, or None.
        codes: the codes of a voice to imitate; empty for none.
        transcription: the transcription of ``codes``.
        voices: the configured voices.
        speech_format: the model's speech format.

    Raises:
        InputError: the voice is unknown, or both a voice and codes are given.
    """
    if voice is None:
        return {
            "audio_prompt_tokens": [int(code) for code in codes],
            "audio_prompt_transcription": transcription,
        }
    if len(codes):
        raise InputError("give either voice or audio_prompt_tokens, because both select a voice")
    return voice_fields(voice, voices, speech_format)


def speech_contexts(
    config: PipelineConfig,
    tokenizer: SpeechTokenizer,
    text: str,
    params: SamplingParams | None,
    fields: SpeechFields,
) -> list[TTSContext]:
    """Return the contexts of the parts of a text.

    Args:
        config: the configuration, with defaults of sampling parameters.
        tokenizer: splits and encodes the text.
        text: the text.
        params: the sampling parameters; None for the defaults and a new seed.
        fields: further fields of the requests.

    Raises:
        InputError: the text cannot be spoken.
    """
    if params is None:
        params = config.default_sampling_params(defaults=tokenizer.speech_format.sampling_defaults)
    return [
        tokenizer.build_speech_context(
            AudioGenerationRequest(
                uuid4().hex, index, config.model.name, input=part, sampling_params=params, **fields
            )
        )
        for index, part in enumerate(tokenizer.split(text))
    ]


class SpeechMethods:
    """Methods of `LLM` that convert texts to speech."""

    if TYPE_CHECKING:
        config: PipelineConfig
        pipeline: AudioGeneratorPipeline
        tokenizer: SpeechTokenizer
        _runner: BatchRunner

        def _check_task(self, method: str, task: PipelineTask) -> None: ...

    def speak(
        self,
        texts: str | Sequence[str],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
        *,
        voice: str | None = None,
        audio_prompt_tokens: Sequence[int] = (),
        audio_prompt_transcription: str = "",
        adapter: str | None = None,
    ) -> Any:
        """Return the audio of texts. Long texts are split into parts, and the audio of the parts is joined.

        Args:
            texts: a text, or a list of texts.
            sampling_params: the parameters for all texts. None stands for the checkpoint's values, the values
                of its speech format for missing values, and a new seed for each text.
            use_tqdm: show a progress bar, if standard error is a terminal.
            voice: the name of a voice of the model, or of a configured voice to imitate.
            audio_prompt_tokens: codes of a voice to imitate; not together with ``voice``.
            audio_prompt_transcription: the transcription of ``audio_prompt_tokens``.
            adapter: the LoRA adapter.

        Returns:
            A `Speech` for a single text, or a list of `Speech` objects in the order of the texts.

        Raises:
            InputError: a text cannot be converted to speech; all other texts are cancelled.
            RequestFailedError: the model generated no speech.
            TaskMismatchError: the model does not generate audio.
        """
        self._check_task("LLM.speak", PipelineTask.AUDIO_GENERATION)
        fields = self._speech_fields(voice, audio_prompt_tokens, audio_prompt_transcription, adapter)
        batch = [texts] if isinstance(texts, str) else list(texts)
        results: list[list[SpeechResult]] = []
        for index, text in enumerate(batch):
            try:
                results.append(
                    [
                        SpeechResult(context)
                        for context in self._speech_contexts(text, sampling_params, fields)
                    ]
                )
            except InputError as error:
                if len(batch) > 1:
                    error.add_note(f"in text {index + 1} of {len(batch)}")
                raise
        builders = [part for parts in results for part in parts]
        progress = GenerationProgress(len(builders), shown=use_tqdm)
        with self._runner.exclusive(), deferred_interrupts() as deliver_interrupts, progress:
            token_counts = {builder.context.request_id: 0 for builder in builders}
            for updated_results in self._runner.run(builders, seconds=BATCH_LATENCY_BUDGET):
                deliver_interrupts()
                new_token_counts = {
                    result.context.request_id: len(result.context.generated_tokens)
                    for result in updated_results
                }
                progress.advance(
                    num_tokens=sum(
                        total - token_counts[request_id] for request_id, total in new_token_counts.items()
                    ),
                    num_prompts=sum(result.is_done for result in updated_results),
                )
                token_counts |= new_token_counts
        speeches = [self._speech(parts) for parts in results]
        return speeches[0] if isinstance(texts, str) else speeches

    def stream_speech(
        self,
        text: str,
        sampling_params: SamplingParams | None = None,
        *,
        voice: str | None = None,
        audio_prompt_tokens: Sequence[int] = (),
        audio_prompt_transcription: str = "",
        adapter: str | None = None,
    ) -> SpeechStream:
        """Return the audio of one text as a stream of chunks, the first chunk as early as possible.

        See `speak` for the parameters. The audio of the parts of a long text is generated in order. The
        metadata of a chunk contain ``sample_rate``, ``num_tokens`` so far, ``seconds`` of audio so far, and
        ``elapsed_seconds`` since the first chunk was requested. From this request until the stream ends or is
        closed, other calls raise `UnsupportedFeatureError`.

        Raises:
            InputError: the text cannot be spoken.
            TaskMismatchError: the model does not generate audio.
        """
        self._check_task("LLM.stream_speech", PipelineTask.AUDIO_GENERATION)
        fields = self._speech_fields(voice, audio_prompt_tokens, audio_prompt_transcription, adapter)
        contexts = self._speech_contexts(text, sampling_params, {**fields, "streaming": True})
        return SpeechStream(self._speech_chunks(contexts), self.pipeline.sample_rate)

    def _speech_chunks(self, contexts: Sequence[TTSContext]) -> Generator[AudioGeneratorOutput, None, None]:
        import torch

        start_time, sample_rate = perf_counter(), self.pipeline.sample_rate
        num_samples, num_tokens = 0, 0
        with self._runner.exclusive():
            for context in contexts:
                result = SpeechResult(context)
                for _ in self._runner.run([result], seconds=STREAMING_LATENCY_BUDGET):
                    is_last = result.is_done and context is contexts[-1]
                    if result.new_chunk is None and not is_last:
                        continue
                    chunk = np.zeros(0, np.float32) if result.new_chunk is None else result.new_chunk
                    num_samples += len(chunk)
                    metadata: dict[str, object] = {
                        "sample_rate": sample_rate,
                        "num_tokens": num_tokens + len(context.generated_tokens),
                        "seconds": num_samples / sample_rate,
                        "elapsed_seconds": perf_counter() - start_time,
                    }
                    result.new_chunk = None
                    yield AudioGeneratorOutput(torch.from_numpy(chunk), metadata, is_last)
                num_tokens += len(context.generated_tokens)

    def _speech_fields(
        self, voice: str | None, codes: Sequence[int], transcription: str, adapter: str | None
    ) -> SpeechFields:
        """Return the request fields that are the same for all parts of all texts."""
        configured_voices, speech_format = self.pipeline.voices, self.tokenizer.speech_format
        return {
            **voice_options(voice, codes, transcription, configured_voices, speech_format),
            "streaming": False,
            "adapter": adapter,
            "cache_salt": None,
            "priority": 0,
        }

    def _speech_contexts(
        self, text: str, params: SamplingParams | None, fields: SpeechFields
    ) -> list[TTSContext]:
        """Return the contexts of the parts of a text."""
        return speech_contexts(self.config, self.tokenizer, text, params, fields)

    def _speech(self, parts: Sequence[SpeechResult]) -> Speech:
        chunks = [chunk for part in parts for chunk in part.chunks]
        contexts = [part.context for part in parts]
        return Speech(
            audio=np.concatenate(chunks),
            sample_rate=self.pipeline.sample_rate,
            num_tokens=sum(len(context.generated_tokens) for context in contexts),
            is_cut=any(context.speech_token_status.value == "maximum_length" for context in contexts),
        )
