"""`AudioGeneratorPipeline`: speech tokens from a language model, and audio from a codec.

One call of ``execute`` generates tokens for the contexts whose speech has not ended, and then decodes the
chunks whose frames are complete:

    speech tokens   | decoded ........ | chunk ...... | right context | incomplete frame |
                        left context ->|<-- samples ->|

The boundaries of chunks depend only on the number of decoded frames. Batching, the number of steps per call
and preemption therefore do not change the audio. The codec has no state: a context stores its tokens and
``decoded_index``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from penstock.codecs import CODECS, AudioCodec, CodecChunk, CodecRegistry, SupportedCodec, load_codec
from penstock.errors import ConfigError, InputError, RequestFailedError
from penstock.kv_cache import ReservedBatch
from penstock.pipelines.core import (
    AudioGenerationResponse,
    PipelineTask,
    TextGenerationStatus,
    TTSContext,
    VoicePrompt,
)
from penstock.pipelines.speech_tokens import SpeechTokenGenerationPipeline, create_speech_tokens
from penstock.pipelines.task_pipeline import TaskPipeline
from penstock.pipelines.voices import load_voices
from penstock.weights.hub import resolve_codec
from penstock.weights.json_files import read_json_object

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.lora import LoRAManager
    from penstock.pipelines.tasks import PipelineRequirements
    from penstock.text.speech_format import SpeechFormat

_logger = logging.getLogger(__name__)

_FIRST_CHUNK_SECONDS, _LARGEST_CHUNK_SECONDS, _RESPONSE_CHUNK_SECONDS = 0.15, 2.0, 10.0
"""Seconds of audio per chunk: the first and the largest chunk of a stream, and chunks of requests without
streaming. Short chunks reduce latency. Long chunks recompute less context.
"""


@dataclass(frozen=True)
class ChunkSizes:
    """The chunk sizes of a context, in frames: `first`, then twice the previous size, up to `largest`."""

    first: int
    largest: int

    def size_after(self, num_decoded: int) -> int:
        """Return the size of the chunk that follows ``num_decoded`` frames."""
        return min(num_decoded + self.first, self.largest)


def create_audio(
    requirements: PipelineRequirements, codecs: CodecRegistry = CODECS
) -> AudioGeneratorPipeline:
    """Load the codec and the model, and return their pipeline.

    Args:
        requirements: the arguments of the pipeline factory; the tokenizer is a `SpeechTokenizer`.
        codecs: the registry in which the codec is looked up.

    Raises:
        CheckpointError: the model or the codec cannot be loaded.
        ConfigError: the codec does not fit the speech format, or a voice cannot be read.
        InsufficientMemoryError: weights and the smallest permitted KV cache do not fit.
    """
    config = requirements.config
    session = requirements.open_session()
    speech_format = requirements.tokenizer.speech_format
    folder = codec_folder(config, speech_format)
    record = codecs.detect(read_json_object(folder / "config.json"), folder)
    # Loaded before the model, so that the memory plan counts its memory as used.
    codec = load_codec(folder, session, encoding=codec_encoding(config, record), registry=codecs)
    check_codec(codec, speech_format)
    voices = load_voices(config.speech.voice, codec, folder)
    return AudioGeneratorPipeline(
        create_speech_tokens(requirements, session),
        codec,
        voices=voices,
        chunk_frames=config.speech.audio_chunk_frames,
    )


def codec_folder(config: PipelineConfig, speech_format: SpeechFormat) -> Path:
    """Return the folder of the codec.

    In order of precedence: the configured codec, the codec that the checkpoint names, the default codec of
    the speech format.
    """
    configured_codec, checkpoint_codec = config.speech.codec, speech_format.description.codec
    if (
        configured_codec is None
        and checkpoint_codec is not None
        and (config.model.checkpoint / checkpoint_codec).is_dir()
    ):
        return config.model.checkpoint / checkpoint_codec
    return resolve_codec(configured_codec or checkpoint_codec or speech_format.default_codec)


def codec_encoding(config: PipelineConfig, codec: SupportedCodec) -> str | None:
    """Return the weight encoding of the codec: the configured one, or that of the model if supported.

    Returns None, which selects the default of the codec, if none is configured and the codec does not support
    the encoding of the model.
    """
    if config.speech.codec_encoding is not None:
        return config.speech.codec_encoding
    return config.model.encoding if config.model.encoding in codec.encodings else None


def check_codec(codec: AudioCodec, speech_format: SpeechFormat) -> None:
    """Check that the codec can decode the codes of a speech format.

    Raises:
        ConfigError: the codes per frame differ, or the codebook of the codec is too small.
    """
    format_sizes = (speech_format.codes.codes_per_frame, speech_format.codes.codebook_size)
    codec_sizes = (codec.codes_per_frame, codec.codebook_size)
    if format_sizes[0] != codec_sizes[0] or format_sizes[1] > codec_sizes[1]:
        raise ConfigError(
            "codec",
            f"{codec.name} has {codec_sizes[0]} codes per frame, each from 0 to {codec_sizes[1] - 1}, but "
            f"the speech format {speech_format.name!r} has {format_sizes[0]} codes per frame, each from 0 to "
            f"{format_sizes[1] - 1}: give another codec",
        )


class AudioGeneratorPipeline(TaskPipeline[TTSContext, AudioGenerationResponse]):
    """Generates audio with a speech-token pipeline and a codec.

    Args:
        speech_lm_pipeline: generates the speech tokens.
        codec: decodes the speech tokens.
        voices: the voices to imitate, by name.
        chunk_frames: the number of frames of each chunk; None derives chunk sizes from the frame rate.
    """

    task = PipelineTask.AUDIO_GENERATION
    context_types = (TTSContext,)

    def __init__(
        self,
        speech_lm_pipeline: SpeechTokenGenerationPipeline,
        codec: AudioCodec,
        *,
        voices: Mapping[str, VoicePrompt] | None = None,
        chunk_frames: int | None = None,
    ) -> None:
        super().__init__(speech_lm_pipeline.session, speech_lm_pipeline.memory_plan, speech_lm_pipeline.kv)
        self.speech_lm_pipeline = speech_lm_pipeline
        self.codec = codec
        self._voices = dict(voices or {})
        first, largest, response_size = (
            ceil(seconds * codec.frame_rate) if chunk_frames is None else chunk_frames
            for seconds in (_FIRST_CHUNK_SECONDS, _LARGEST_CHUNK_SECONDS, _RESPONSE_CHUNK_SECONDS)
        )
        self._stream_sizes = ChunkSizes(first, largest)
        self._response_sizes = ChunkSizes(response_size, response_size)
        self._chunk_ends: dict[int, int] = {}
        self._max_frames = max(response_size, largest)
        """Number of frames, over all contexts, after which a call of ``execute`` decodes no further chunk."""

    # -- AudioGenerator ---------------------------------------------------------------------------------

    @property
    def decoder_sample_rate(self) -> int:
        """Samples per second."""
        return self.codec.sample_rate

    def next_chunk(
        self, batch: Mapping[str, TTSContext], num_tokens: int
    ) -> dict[str, AudioGenerationResponse]:
        """Generate up to ``num_tokens`` speech tokens for each context, and decode the complete frames.

        Before the speech has ended, the codec uses the last frames as right context only. A later call
        decodes these frames.

        Raises:
            InputError: ``num_tokens`` is less than 1, or a context has ended.
        """
        if num_tokens < 1:
            raise InputError(f"num_tokens must be at least 1, was {num_tokens}")
        self._check_batch(batch)
        token_limits = dict.fromkeys(batch, num_tokens)
        self.speech_lm_pipeline.next_speech_token(self._generating_contexts(batch), num_tokens, token_limits)
        max_frames = max(len(context.speech_tokens) for context in batch.values()) if batch else 0
        return self._respond(batch, ChunkSizes(max_frames, max_frames), allows_short_chunks=True)

    # -- TaskPipeline -----------------------------------------------------------------------------------

    def execute(
        self, batch: Mapping[str, TTSContext], num_steps: int = 1
    ) -> dict[str, AudioGenerationResponse]:
        """Run up to ``num_steps`` steps of the language model, and decode complete chunks.

        For contexts that have generated all tokens, only audio is decoded. Their cache blocks are already
        free.
        """
        if num_steps < 1:
            raise InputError(f"num_steps must be at least 1, was {num_steps}")
        self._check_batch(batch)
        generating_contexts = self._generating_contexts(batch)
        if generating_contexts:
            self.speech_lm_pipeline.execute(generating_contexts, num_steps)
        return self._respond(batch, None)

    def ready(self, context: TTSContext) -> bool:
        self.check_context_types([context])
        return self.speech_lm_pipeline.ready(context)

    def release(self, context: TTSContext) -> None:
        """Free the resources of a context. Does nothing if they are freed already."""
        self.speech_lm_pipeline.release(context)

    def num_steps_for(self, seconds: float) -> int:
        return self.speech_lm_pipeline.num_steps_for(seconds)

    def prepare_next(self) -> bool:
        return self.speech_lm_pipeline.prepare_next()

    @property
    def lora_manager(self) -> LoRAManager | None:
        return self.speech_lm_pipeline.lora_manager

    @property
    def sample_rate(self) -> int:
        return self.codec.sample_rate

    @property
    def voices(self) -> Mapping[str, VoicePrompt]:
        return self._voices

    def close(self) -> None:
        self.speech_lm_pipeline.close()

    # -- Tokens -----------------------------------------------------------------------------------------

    def _check_batch(self, batch: Mapping[str, TTSContext]) -> None:
        """Check that all contexts can be served, before any state changes."""
        self.session.check_process()
        self.check_context_types(batch.values())
        for request_id, context in batch.items():
            if context.is_done:
                status = context.audio_generation_status
                raise InputError(f"request {request_id} has ended ({status.value})")

    def _generating_contexts(self, batch: Mapping[str, TTSContext]) -> dict[str, TTSContext]:
        """Return the contexts that still generate tokens, as a `ReservedBatch` if ``batch`` is one."""
        generating_contexts = {
            request_id: context
            for request_id, context in batch.items()
            if not context.generation_status.is_done
        }
        return ReservedBatch(generating_contexts) if isinstance(batch, ReservedBatch) else generating_contexts

    # -- Audio ------------------------------------------------------------------------------------------

    def _respond(
        self,
        batch: Mapping[str, TTSContext],
        chunk_sizes: ChunkSizes | None,
        allows_short_chunks: bool = False,
    ) -> dict[str, AudioGenerationResponse]:
        """Decode the complete chunks, update the contexts and return their responses.

        Args:
            batch: the contexts.
            chunk_sizes: the sizes; None selects the sizes of each context by whether it is streamed.
            allows_short_chunks: whether chunks of unfinished contexts may be shorter than these sizes.
        """
        self.failures |= self.speech_lm_pipeline.failures
        self.speech_lm_pipeline.failures.clear()
        audio: dict[str, list[npt.NDArray[np.float32]]] = {}
        num_frames_left = self._max_frames
        while num_frames_left > 0:
            due_chunks = {
                request_id: chunk
                for request_id, context in batch.items()
                if request_id not in self.failures
                and (chunk := self._next_chunk(context, chunk_sizes, allows_short_chunks=allows_short_chunks))
                is not None
            }
            if not due_chunks:
                break
            for request_id, samples in self._decode(due_chunks).items():
                audio.setdefault(request_id, []).append(samples)
                chunk = due_chunks[request_id]
                end = (chunk.start + chunk.num_frames) * self.codec.codes_per_frame
                batch[request_id].set_decoded_index(end)
            if not allows_short_chunks:
                num_frames_left -= sum(chunk.num_frames for chunk in due_chunks.values())
        for request_id, context in batch.items():
            if request_id not in self.failures:
                self._finish_context(request_id, context)
        return {
            request_id: AudioGenerationResponse(
                context.audio_generation_status,
                np.concatenate(audio[request_id]) if request_id in audio else None,
            )
            for request_id, context in batch.items()
            if request_id not in self.failures
        }

    def _next_chunk(
        self, context: TTSContext, chunk_sizes: ChunkSizes | None, *, allows_short_chunks: bool
    ) -> CodecChunk | None:
        """Return the next chunk of a context; None if its frames are not complete or all are decoded."""
        codec, codes_per_frame = self.codec, self.codec.codes_per_frame
        start = context.decoded_index // codes_per_frame
        num_frames = len(context.speech_tokens) // codes_per_frame
        has_ended = context.generation_status.is_done
        if chunk_sizes is None:
            chunk_sizes = self._stream_sizes if context.streaming else self._response_sizes
        stop = self._chunk_end(start + chunk_sizes.size_after(start))
        num_ready = codec.ready_frames(num_frames, ended=has_ended)
        if num_ready <= start or (num_ready < stop and not has_ended and not allows_short_chunks):
            return None
        stop = min(stop, num_ready)
        context_start, context_stop = codec.context_at(start, stop)
        context_stop = min(context_stop, num_frames)
        codes, _ = context.next_speech_tokens(
            (context_stop - start) * codes_per_frame, (start - context_start) * codes_per_frame
        )
        frames = torch.from_numpy(codes.astype(np.int64)).view(-1, codes_per_frame)
        is_last = has_ended and context_stop == num_frames
        return CodecChunk(frames, start, start - context_start, context_stop - stop, is_last)

    def _chunk_end(self, stop: int) -> int:
        """Return the end of a chunk of an unfinished stream: the first valid end at or after ``stop``.

        If a codec decodes whole blocks of frames, only the ends of blocks are valid.
        """
        end = self._chunk_ends.get(stop)
        if end is None:
            frame_counts = range(stop, stop + self.codec.right_context + 1)
            valid_ends = (self.codec.ready_frames(count, ended=False) for count in frame_counts)
            end = next((valid_end for valid_end in valid_ends if valid_end >= stop), stop)
            self._chunk_ends[stop] = end
        return end

    def _decode(self, due_chunks: Mapping[str, CodecChunk]) -> dict[str, npt.NDArray[np.float32]]:
        """Return the samples of each chunk. An error in one chunk ends only the request of the chunk."""
        chunks: Sequence[CodecChunk] = list(due_chunks.values())
        try:
            with torch.inference_mode():
                samples = self.codec.decode_chunks(chunks)
        except Exception as error:
            if len(due_chunks) > 1:
                return {
                    request_id: waveform
                    for item in due_chunks.items()
                    for request_id, waveform in self._decode(dict([item])).items()
                }
            (request_id,) = due_chunks
            _logger.exception("request %s ended because the codec failed", request_id)
            failure = RequestFailedError(
                f"request {request_id} ended because the codec {self.codec.name} failed "
                f"({type(error).__name__}); the log shows details"
            )
            self.failures[request_id] = failure
            return {}
        return {
            request_id: waveform.float().cpu().numpy()
            for request_id, waveform in zip(due_chunks, samples, strict=True)
        }

    def _finish_context(self, request_id: str, context: TTSContext) -> None:
        """Update a context whose tokens are all generated; does nothing for other contexts.

        Frees the resources of the context in the language model. Ends the context if its tokens are decoded
        or it is cancelled. Records a failure if it has no speech tokens.
        """
        status = context.generation_status
        if not status.is_done:
            return
        self.speech_lm_pipeline.release(context)
        if status is TextGenerationStatus.CANCELLED or not context.has_undecoded_speech_tokens():
            context.update_audio_generation_status(status)
        if not len(context.speech_tokens):
            codes_per_frame = self.codec.codes_per_frame
            self.failures[request_id] = RequestFailedError(
                f"the model generated {len(context.generated_tokens)} tokens without a whole frame of "
                f"speech ({codes_per_frame} codes); {context.num_dropped_tokens} tokens were dropped (not "
                "speech codes, or an incomplete frame): allow more tokens, or check --speech-format"
            )
