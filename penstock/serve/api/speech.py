"""The routes ``/v1/audio/speech`` and ``/v1/audio/voices``. Speech is streamed while it is generated."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NoReturn, cast
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from penstock.errors import InputError, MissingDependencyError
from penstock.media.audio_files import AudioEncoder, Samples
from penstock.pipelines.core import AudioGenerationRequest, TTSContext
from penstock.serve.api.generation import cancel_on_disconnect, run_in_pool
from penstock.serve.api.models import requested_adapter
from penstock.serve.api.parameters import map_input_errors
from penstock.serve.api.speech_run import SpeechRun
from penstock.serve.api.speech_schemas import SpeechBody
from penstock.serve.api.text_generation import checked_body, record_error
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import BODY_ERRORS, request_body, responses
from penstock.serve.http.problems import Problem, RequestProblem
from penstock.serve.http.sse import PING, EventStream, event
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services
from penstock.text.speech_tokenizer import SpeechTokenizer, VoiceFields, voice_fields

router = APIRouter(route_class=JsonRoute, tags=["speech"])

_AUDIO_RESPONSE: dict[int | str, dict[str, object]] = {
    200: {
        "description": "The audio, or events of the types speech.audio.delta and speech.audio.done.",
        "content": {
            "audio/mpeg": {"schema": {"type": "string", "format": "binary"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    },
    **responses(*BODY_ERRORS),
}


class AudioCutOffError(Exception):
    """An error during a stream of audio bytes.

    The server closes the connection before the stream is complete.
    """


@router.post(
    "/v1/audio/speech",
    response_class=Response,
    openapi_extra=request_body(SpeechBody),
    responses=_AUDIO_RESPONSE,
)
async def create_speech(request: Request) -> Response:
    """Return the speech for a text. The response begins when the first audio has been generated."""
    services, record = Services.of(request), RequestRecord.of(request)
    raw = await request.json()
    body, contexts, encoder = await run_in_pool(request, lambda: _prepare(services, raw))
    record.model, record.user, record.stream = body.model, body.user, True
    record.details["seed"] = contexts[0].sampling_params.seed
    run = SpeechRun(services, record, contexts)
    speech = _SpeechResponse(request, run, encoder, as_events=body.stream_format == "sse")
    try:
        await cancel_on_disconnect(request, run, speech.begin)
    except BaseException:
        run.finish()
        raise
    return EventStream(
        speech.body_chunks(),
        on_error=lambda error: record_error(services, record, error),
        on_disconnect=run.cancel,
        error_event=None if speech.as_events else _raise_cut_off,
        media_type="text/event-stream" if speech.as_events else encoder.format.media_type,
        is_text=speech.as_events,
    )


@router.get("/v1/audio/voices", responses=responses(400, 401, 403, 421))
async def list_voices(request: Request) -> dict[str, object]:
    """Return the names and types of the voices that a request can select."""
    services = Services.of(request)
    cloned_voices = [voice.name for voice in services.worker.info.voices]
    trained_voices = [
        name for name in _speech_tokenizer(services).speech_format.voices if name not in cloned_voices
    ]
    voice_types = {**dict.fromkeys(cloned_voices, "imitated"), **dict.fromkeys(trained_voices, "trained")}
    data = [{"id": name, "object": "voice", "type": voice_type} for name, voice_type in voice_types.items()]
    return {"object": "list", "data": data, "voices": [*voice_types]}


class _SpeechResponse:
    """The body of a speech response: audio bytes, or events that contain audio bytes."""

    def __init__(self, request: Request, run: SpeechRun, encoder: AudioEncoder, *, as_events: bool) -> None:
        self.as_events = as_events
        self._request = request
        self._run = run
        self._encoder = encoder
        self._chunks = run.chunks()
        self._first_audio: Samples | None = None

    async def begin(self) -> None:
        """Wait for the first audio. The route calls this method before the response headers are sent.

        Raises:
            PenstockError: the request failed before the first audio.
            RequestProblem: 503; a time limit was exceeded before the first audio.
        """
        await self._run.admitted()
        while self._first_audio is None:
            self._first_audio = await anext(self._chunks)

    async def body_chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the audio bytes or the events of the response."""
        async with aclosing(self._chunks):
            yield self._chunk(await self._encode_audio(self._first_audio))
            async for chunk in self._chunks:
                if chunk is not None:
                    yield self._chunk(await self._encode_audio(chunk))
                elif self.as_events:
                    yield PING
            yield self._chunk(await self._encode_audio(None))
            if self.as_events:
                yield event({"type": "speech.audio.done", "usage": self._run.usage})

    def _chunk(self, data: bytes) -> bytes:
        if not self.as_events or not data:
            return data
        return event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})

    async def _encode_audio(self, samples: Samples | None) -> bytes:
        """Return the encoded bytes of samples, or the last bytes of the audio file if ``samples`` is None.

        Formats with a container are encoded in the thread pool.
        """
        encoder = self._encoder

        def encode() -> bytes:
            return encoder.finish() if samples is None else encoder.add(samples)

        return encode() if encoder.format.container is None else await run_in_pool(self._request, encode)


def _prepare(services: Services, raw: object) -> tuple[SpeechBody, list[TTSContext], AudioEncoder]:
    """Validate a request. Return its body, its contexts and an audio encoder.

    Blocks: call it in a thread pool.

    Raises:
        RequestProblem: 400; the message names the invalid field.
        UnknownModelError: the server has no model or adapter with the requested name.
    """
    body = checked_body(services, SpeechBody, raw)
    adapter = requested_adapter(services, body.model)
    tokenizer, info = _speech_tokenizer(services), services.worker.info
    speech_format = tokenizer.speech_format
    try:
        encoder = AudioEncoder(body.response_format, info.sample_rate)
    except (MissingDependencyError, InputError) as error:
        raise RequestProblem(400, str(error), param="response_format", code="unsupported_value") from error
    if body.voice_name is not None and body.audio_prompt_tokens:
        raise RequestProblem(
            400, "voice and audio_prompt_tokens both set the voice: send only one of them", param="voice"
        )
    with map_input_errors("voice"):
        voices_by_name = {voice.name: voice for voice in info.voices}
        voice_options: VoiceFields = (
            {} if body.voice_name is None else voice_fields(body.voice_name, voices_by_name, speech_format)
        )
    if body.audio_prompt_tokens:
        voice_options = {
            "audio_prompt_tokens": body.audio_prompt_tokens,
            "audio_prompt_transcription": body.audio_prompt_transcription or "",
        }
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    with map_input_errors(None):
        params = services.pipeline_config.default_sampling_params(
            defaults=speech_format.sampling_defaults,
            max_new_tokens=body.max_tokens,
            **{name: getattr(body, name) for name in names},
        )
    request_id = f"speech-{uuid4().hex}"
    with map_input_errors("input"):
        contexts = [
            tokenizer.build_speech_context(
                AudioGenerationRequest(
                    f"{request_id}-{index}",
                    index,
                    body.model,
                    input=part,
                    sampling_params=params,
                    streaming=True,
                    adapter=adapter,
                    priority=body.priority or 0,
                    **voice_options,
                )
            )
            for index, part in enumerate(tokenizer.split(body.input))
        ]
    return body, contexts, encoder


def _speech_tokenizer(services: Services) -> SpeechTokenizer:
    """Return the tokenizer of a speech model."""
    return cast(SpeechTokenizer, services.tokenizer)


def _raise_cut_off(problem: Problem) -> NoReturn:
    """Raise an error that makes the server close the connection. Audio bytes cannot contain an error."""
    raise AudioCutOffError(problem.message)
