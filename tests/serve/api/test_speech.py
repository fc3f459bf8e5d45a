"""``/v1/audio/speech`` and ``/v1/audio/voices`` with a tiny speech model and a real worker."""

from __future__ import annotations

import asyncio
import base64
import io
import wave
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from support.asgi import Exchange, wait_until
from support.in_process_server import InProcessServer, parse_events, run_in_process
from support.live_server import live_server
from support.tiny_speech import SAMPLE_RATE, FakeCodec, fake_codec_catalog, write_tiny_speech
from support.workers import Gate

from penstock import LLM
from penstock.assembly import load_runtime, load_tokenizer
from penstock.config import PipelineConfig
from penstock.media.audio_files import pcm_bytes
from penstock.pipelines.core import SamplingParams

LONG = "One sentence is this one. And another one follows it here. This is the third."
SAMPLING = {"seed": 3, "temperature": 1.0, "max_tokens": 60}
ROUTE = "/v1/audio/speech"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_speech(
        tmp_path_factory.mktemp("speech"), end_logit_ratio=0.85, max_characters=60, voices=["amy"]
    )


def make_options(folder: Path, **fields: Any) -> dict[str, Any]:
    """Return the options of `run_in_process` for a speech model."""
    settings = {"model_path": str(folder), "served_model_name": "tiny", "kv_cache_memory": 4 << 20}
    config = PipelineConfig.from_flat({**settings, "voice": ("zoe=1,2,3",), **fields})
    tokenizer = load_tokenizer(config, fake_codec_catalog())
    make_runtime = partial(load_runtime, config, fake_codec_catalog())
    return {"make_runtime": make_runtime, "tokenizer": tokenizer, "pipeline_config": config}


@asynccontextmanager
async def open_speech_server(folder: Path, **fields: Any) -> AsyncIterator[InProcessServer]:
    async with run_in_process(**make_options(folder, **fields)) as server:
        server.services.tokenizer.max_length = server.services.worker.info.max_length
        yield server


@pytest.fixture(scope="module")
def library_audio(folder: Path) -> Iterator[Any]:
    """Yield a function that returns the PCM bytes of `LLM.speak`."""
    config = PipelineConfig.from_flat({"model_path": str(folder), "kv_cache_memory": 4 << 20})
    with LLM.from_config(config, catalog=fake_codec_catalog()) as llm:

        def speak(text: str, **options: Any) -> bytes:
            params = SamplingParams(seed=3, temperature=1.0, top_k=50, top_p=1, max_new_tokens=60)
            return pcm_bytes(llm.speak(text, params, use_tqdm=False, **options).audio)

        yield speak


async def synthesize(server: InProcessServer, **body: Any) -> bytes:
    response = await server.http.post(ROUTE, json={"input": "Hello.", **SAMPLING, **body})
    assert response.status_code == 200, response.text
    return response.content


async def test_audio_equals_the_audio_of_the_library(folder: Path, library_audio: Any) -> None:
    async with open_speech_server(folder) as server:
        for text in ("Hello.", LONG):
            pcm = await synthesize(server, input=text, response_format="pcm")
            assert pcm == library_audio(text)
            assert len(pcm) > 20
        with wave.open(io.BytesIO(await synthesize(server, response_format="wav"))) as file:
            assert file.getframerate() == SAMPLE_RATE
            assert file.readframes(1 << 20) == library_audio("Hello.")
        assert await synthesize(server, voice="default", response_format="pcm") == library_audio("Hello.")
        options = {"audio_prompt_tokens": [4, 5], "audio_prompt_transcription": "Ho"}
        cloned_audio = await synthesize(server, response_format="pcm", **options)
        assert cloned_audio == library_audio("Hello.", **options) != library_audio("Hello.")
        responses = {
            name: (await server.http.post(ROUTE, json={"input": "a", "response_format": name, **SAMPLING}))
            for name in ("wav", "pcm")
        }
        assert {name: response.headers["content-type"] for name, response in responses.items()} == {
            "wav": "audio/wav",
            "pcm": "audio/pcm",
        }


async def test_audio_bytes_are_sent_unchanged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not escape audio bytes that are equal to the bytes of a UTF-8 line separator."""
    audio = "\u0085\u2028\u2029".encode()
    monkeypatch.setattr("penstock.serve.api.speech.AudioEncoder.add", lambda encoder, samples: audio)
    async with open_speech_server(folder) as server:
        for name in ("pcm", "wav"):
            content = await synthesize(server, response_format=name)
            assert content.count(audio) == len(content) // len(audio) > 0


async def test_audio_is_streamed_as_events(folder: Path, library_audio: Any) -> None:
    async with open_speech_server(folder) as server:
        body = {"input": LONG, "response_format": "pcm", "stream_format": "sse", **SAMPLING}
        response = await server.http.post(ROUTE, json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        *deltas, end_event = parse_events(response.text)
        assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
        assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == library_audio(LONG)
        assert end_event["type"] == "speech.audio.done"
        usage = end_event["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["output_tokens"] >= len(library_audio(LONG)) / 2 / 8


async def test_each_decoded_chunk_is_sent_as_an_event(
    folder: Path, library_audio: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codec may decode a chunk only after the client has received the event of the previous chunk."""
    text = "One sentence is this one."
    audio, gate = library_audio(text), Gate()
    decode_chunks = FakeCodec.decode_chunks

    def decode_if_allowed(codec: FakeCodec, chunks: Any) -> Any:
        gate.wait()
        return decode_chunks(codec, chunks)

    async with open_speech_server(folder, audio_chunk_frames=4) as server:
        monkeypatch.setattr(FakeCodec, "decode_chunks", decode_if_allowed)
        body = {"input": text, "response_format": "pcm", "stream_format": "sse", **SAMPLING}
        stream = Exchange(server.app, ROUTE, body)
        for num_chunks in (1, 2, 3):
            gate.allow_steps(1)
            await wait_until(lambda count=num_chunks: len(parse_events(stream.body.decode())) == count)
        gate.open()
        await stream.wait_until_ended()
        *deltas, end_event = parse_events(stream.body.decode())
        assert [delta["type"] for delta in deltas[:3]] == 3 * ["speech.audio.delta"]
        assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == audio
        assert end_event["type"] == "speech.audio.done"


async def test_voices_are_listed_with_their_types(folder: Path) -> None:
    async with open_speech_server(folder) as server:
        answer = (await server.http.get("/v1/audio/voices")).json()
        assert answer["voices"] == ["zoe", "amy"]
        assert [item["type"] for item in answer["data"]] == ["imitated", "trained"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"voice": "alloy"}, "voice", "'alloy' is unknown: known are zoe, amy"),
        ({"voice": {"id": "x"}}, "voice", "'x' is unknown"),
        ({"voice": "zoe"}, "input", "needs its transcription"),
        ({"speed": 1.5}, "speed", "the model speaks at one speed"),
        ({"instructions": "Whisper"}, "instructions", "takes no instructions"),
        ({"response_format": "aac"}, "response_format", "'mp3', 'opus', 'flac', 'wav' or 'pcm'"),
        ({"input": ""}, "input", "at least 1 character"),
        ({"input": "  "}, "input", "the input is empty"),
        ({"input": "a" * 4097}, "input", "at most 4096 characters"),
        ({"temperature": -1.0}, None, "temperature"),
        ({"speeed": 1}, "speeed", "speed"),
        ({"voice": "zoe", "audio_prompt_tokens": [1]}, "voice", "send only one"),
        ({"audio_prompt_tokens": [99], "audio_prompt_transcription": "a"}, "input", "from 0 to 15"),
    ],
)
async def test_invalid_fields_are_refused(
    folder: Path, body: dict[str, Any], param: str | None, message: str
) -> None:
    async with _open_server_with_shared_options(folder) as server:
        request_body = {"input": "a", "response_format": "wav", **body}
        response = await server.http.post(ROUTE, json=request_body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert message in error["message"]


_OPTIONS: dict[Path, Any] = {}


@asynccontextmanager
async def _open_server_with_shared_options(folder: Path) -> AsyncIterator[InProcessServer]:
    """Yield a server for requests that are refused before they run. Create its options once per folder."""
    options = _OPTIONS.setdefault(folder, make_options(folder))
    async with run_in_process(**options) as server:
        yield server


async def test_fields_with_default_values_are_accepted(folder: Path, library_audio: Any) -> None:
    async with open_speech_server(folder) as server:
        body = {"speed": 1.0, "instructions": "", "user": "ann", "response_format": "pcm"}
        assert await synthesize(server, **body) == library_audio("Hello.")


async def test_a_missing_audio_library_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.media import audio_files

    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    audio_files._soundfile.cache_clear()
    async with _open_server_with_shared_options(folder) as server:
        response = await server.http.post(ROUTE, json={"input": "a"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "response_format"
        assert "penstock-llm[audio]" in response.json()["error"]["message"]
    audio_files._soundfile.cache_clear()


async def test_a_text_model_refuses_speech() -> None:
    async with run_in_process() as server:
        response = await server.http.post(ROUTE, json={"input": "a"})
        assert response.status_code == 400
        assert "audio-generation" in response.json()["error"]["message"]
        assert (await server.http.get("/v1/audio/voices")).status_code == 400


async def test_a_speech_model_refuses_chats(folder: Path) -> None:
    async with _open_server_with_shared_options(folder) as server:
        error = await server.expect_refusal(
            "/v1/chat/completions", messages=[{"role": "user", "content": "a"}]
        )
        assert "text-generation" in error["message"]


async def test_an_output_without_speech_is_an_error(folder: Path) -> None:
    async with open_speech_server(folder) as server:
        server.services.tokenizer.speech_format.description.sampling["allowed_token_ids"] = [65]  # type: ignore[attr-defined]
        try:
            body = {"input": "a", "response_format": "wav", **SAMPLING, "max_tokens": 5}
            response = await server.http.post(ROUTE, json=body)
        finally:
            del server.services.tokenizer.speech_format.description.sampling["allowed_token_ids"]  # type: ignore[attr-defined]
        assert response.status_code == 500
        assert "5 tokens without a whole frame" in response.json()["error"]["message"]


async def test_disconnects_do_not_change_other_speech_streams(folder: Path, library_audio: Any) -> None:
    async with open_speech_server(folder) as server:
        app = server.app
        texts = [f"Hello number {i}." for i in range(16)]
        body = {"response_format": "pcm", **SAMPLING}
        streams = [Exchange(app, ROUTE, {"input": text, **body}) for text in texts]
        for stream in streams[::2]:
            stream.disconnect()
        await asyncio.gather(*(stream.wait_until_ended() for stream in streams))
        for text, stream in zip(texts[1::2], streams[1::2], strict=True):
            assert stream.status == 200
            assert stream.body == library_audio(text)
        await wait_until(lambda: server.services.worker.num_outstanding == 0)
        await wait_until(lambda: server.services.worker.stats.num_used_blocks == 0)


async def test_a_disconnect_cancels_the_remaining_parts_of_the_text(folder: Path) -> None:
    async with open_speech_server(folder) as server:
        app = server.app
        body = {"input": LONG * 4, "response_format": "pcm", **SAMPLING}
        stream = Exchange(app, ROUTE, body)
        stream.may_send.clear()
        await wait_until(lambda: server.services.worker.num_outstanding > 0)
        stream.disconnect()
        stream.may_send.set()
        await stream.wait_until_ended()
        await wait_until(lambda: server.services.worker.num_outstanding == 0)


async def test_speech_metrics_are_counted(folder: Path) -> None:
    async with open_speech_server(folder) as server:
        pcm = await synthesize(server, response_format="pcm")
        text = (await server.http.get("/metrics")).text
        assert "penstock_time_to_first_audio_seconds_count 1.0" in text
        assert "penstock_real_time_factor_count 1.0" in text
        seconds = float(text.split("\npenstock_audio_seconds_total ")[1].split()[0])
        assert seconds == pytest.approx(len(pcm) / 2 / SAMPLE_RATE)


def test_the_openai_client_receives_speech(folder: Path, library_audio: Any) -> None:
    with live_server(**make_options(folder)) as server:
        client = OpenAI(base_url=f"{server.url}v1", api_key="none", max_retries=0)
        sampling_fields = {name: SAMPLING[name] for name in ("seed", "temperature", "max_tokens")}
        request: dict[str, Any] = {"model": "tiny", "voice": "default", "extra_body": sampling_fields}
        with client.audio.speech.with_streaming_response.create(
            input=LONG, response_format="pcm", **request
        ) as response:
            chunks = list(response.iter_bytes())
        assert b"".join(chunks) == library_audio(LONG)
        response = client.audio.speech.create(input="Hello.", response_format="wav", **request)
        assert np.frombuffer(response.content[44:], "<i2").tobytes() == library_audio("Hello.")
