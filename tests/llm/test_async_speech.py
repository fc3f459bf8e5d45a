"""`AsyncLLM.speak` and `stream_speech`, with the demo voice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.asgi import wait_until

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.assembly import load_runtime
from penstock.config import PipelineConfig
from penstock.errors import InputError, TaskMismatchError
from penstock.llm.speech import Speech
from penstock.worker.client import WorkerClient

SHORT_PARAMS = SamplingParams(temperature=0.0, max_new_tokens=40)
TEXTS = ["Good morning.", "One two three. " + "The cat is small. " * 8]


@asynccontextmanager
async def open_async_llm(model: str = "demo-voice", **config: Any) -> AsyncIterator[AsyncLLM]:
    """Yield an AsyncLLM whose worker is a thread of this process."""
    pipeline_config = PipelineConfig.from_flat({"model_path": model, "kv_cache_memory": 32 * 2**20, **config})
    worker = WorkerClient(partial(load_runtime, pipeline_config), in_thread=True)
    async with AsyncLLM.from_config(pipeline_config, worker=worker) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected() -> Iterator[list[Speech]]:
    with LLM("demo-voice", kv_cache_memory=32 * 2**20) as llm:
        yield llm.speak(TEXTS, SHORT_PARAMS, use_tqdm=False)


async def test_audio_equals_the_audio_of_llm(expected: list[Speech]) -> None:
    async with open_async_llm() as llm:
        result = await llm.speak(TEXTS, SHORT_PARAMS)
        single_audio = await llm.speak(TEXTS[0], SHORT_PARAMS)
        for actual, reference in zip([*result, single_audio], [*expected, expected[0]], strict=True):
            np.testing.assert_allclose(actual.audio, reference.audio, atol=1e-5)
            assert (actual.sample_rate, actual.num_tokens, actual.is_cut) == (
                reference.sample_rate,
                reference.num_tokens,
                reference.is_cut,
            )
        assert len(result[1].audio) > 2 * len(result[0].audio)


async def test_joined_chunks_equal_the_audio_of_speak(expected: list[Speech]) -> None:
    async with open_async_llm() as llm:
        for text, full_audio in zip(TEXTS, expected, strict=True):
            chunks = [chunk async for chunk in llm.stream_speech(text, SHORT_PARAMS)]
            assert [chunk.is_done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
            audio = np.concatenate([chunk.audio_data.numpy() for chunk in chunks])
            np.testing.assert_allclose(audio, full_audio.audio, atol=1e-4)
            assert chunks[-1].metadata["num_tokens"] == full_audio.num_tokens
            assert chunks[-1].metadata["seconds"] == len(audio) / full_audio.sample_rate
            assert chunks[0].metadata["elapsed_seconds"] > 0


async def test_a_closed_stream_and_a_cancelled_task_cancel_their_requests() -> None:
    async with open_async_llm() as llm:
        worker = llm._worker
        async with aclosing(llm.stream_speech(TEXTS[1])) as stream:
            await anext(stream)
        await wait_until(lambda: worker.num_outstanding == 0)
        task = asyncio.create_task(llm.speak(TEXTS[1]))
        await wait_until(lambda: worker.num_outstanding > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: worker.num_outstanding == 0)


async def test_invalid_calls_are_refused() -> None:
    async with open_async_llm() as llm:
        with pytest.raises(InputError, match="voice 'nobody' is unknown"):
            await llm.speak("hello", voice="nobody")
        with pytest.raises(InputError, match="at least one character"):
            await llm.speak(["hello", ""])
        with pytest.raises(InputError, match="give either voice or audio_prompt_tokens"):
            await llm.speak("hello", voice="a", audio_prompt_tokens=[1])
        with pytest.raises(TaskMismatchError):
            await llm.embed("hello")
    async with open_async_llm("demo") as llm:
        with pytest.raises(TaskMismatchError, match="speak"):
            await llm.speak("hello")
        with pytest.raises(TaskMismatchError, match="stream_speech"):
            await anext(llm.stream_speech("hello"))
