"""`AsyncLLM.speak` and `stream_speech`, with the embedded voice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.asgi import eventually

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.assembly import load_runtime
from penstock.config import PipelineConfig
from penstock.errors import InputError, TaskMismatchError
from penstock.llm.speech import Speech
from penstock.worker.client import WorkerClient

SHORT = SamplingParams(temperature=0.0, max_new_tokens=40)
TEXTS = ["Good morning.", "One two three. " + "The cat is small. " * 8]


@asynccontextmanager
async def opened(model: str = "demo-voice", **config: Any) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM whose worker is a thread of this process."""
    made = PipelineConfig.from_flat({"model_path": model, "kv_cache_memory": 32 * 2**20, **config})
    worker = WorkerClient(partial(load_runtime, made), in_thread=True)
    async with AsyncLLM.from_config(made, worker=worker) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected() -> Iterator[list[Speech]]:
    with LLM("demo-voice", kv_cache_memory=32 * 2**20) as llm:
        yield llm.speak(TEXTS, SHORT, use_tqdm=False)


async def test_it_gives_the_audio_of_llm(expected: list[Speech]) -> None:
    async with opened() as llm:
        found = await llm.speak(TEXTS, SHORT)
        alone = await llm.speak(TEXTS[0], SHORT)
        for one, other in zip([*found, alone], [*expected, expected[0]], strict=True):
            np.testing.assert_allclose(one.audio, other.audio, atol=1e-5)
            assert (one.sample_rate, one.num_tokens, one.is_cut) == (
                other.sample_rate,
                other.num_tokens,
                other.is_cut,
            )
        assert len(found[1].audio) > 2 * len(found[0].audio)


async def test_a_stream_joins_to_the_whole(expected: list[Speech]) -> None:
    async with opened() as llm:
        for text, whole in zip(TEXTS, expected, strict=True):
            chunks = [chunk async for chunk in llm.stream_speech(text, SHORT)]
            assert [chunk.is_done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
            audio = np.concatenate([chunk.audio_data.numpy() for chunk in chunks])
            np.testing.assert_allclose(audio, whole.audio, atol=1e-4)
            assert chunks[-1].metadata["num_tokens"] == whole.num_tokens
            assert chunks[-1].metadata["seconds"] == len(audio) / whole.sample_rate
            assert chunks[0].metadata["elapsed_seconds"] > 0


async def test_a_closed_stream_and_a_cancelled_task_cancel_their_requests() -> None:
    async with opened() as llm:
        worker = llm._worker
        async with aclosing(llm.stream_speech(TEXTS[1])) as stream:
            await anext(stream)
        await eventually(lambda: worker.num_outstanding == 0)
        task = asyncio.create_task(llm.speak(TEXTS[1]))
        await eventually(lambda: worker.num_outstanding > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: worker.num_outstanding == 0)


async def test_errors() -> None:
    async with opened() as llm:
        with pytest.raises(InputError, match="voice 'nobody' is unknown"):
            await llm.speak("hello", voice="nobody")
        with pytest.raises(InputError, match="at least one character"):
            await llm.speak(["hello", ""])
        with pytest.raises(InputError, match="give either voice or audio_prompt_tokens"):
            await llm.speak("hello", voice="a", audio_prompt_tokens=[1])
        with pytest.raises(TaskMismatchError):
            await llm.embed("hello")
    async with opened("demo") as llm:
        with pytest.raises(TaskMismatchError, match="speak"):
            await llm.speak("hello")
        with pytest.raises(TaskMismatchError, match="stream_speech"):
            await anext(llm.stream_speech("hello"))
