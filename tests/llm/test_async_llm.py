"""`AsyncLLM`: its outputs equal those of `LLM`; cancellation, queueing and invalid calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.asgi import wait_until
from support.engines import FakeEngine
from support.tiny_embedder import write_tiny_embedder

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.assembly import load_runtime
from penstock.config import PipelineConfig
from penstock.errors import ConfigError, InputError, PromptTooLongError, TaskMismatchError
from penstock.worker.client import WorkerClient
from penstock.worker.router import WorkerRouter

GREEDY = SamplingParams(max_new_tokens=12)


@asynccontextmanager
async def open_async_llm(max_queue_size: int | None = None, **config: Any) -> AsyncIterator[AsyncLLM]:
    """Yield an AsyncLLM whose worker is a thread of this process."""
    config = {"model_path": "demo", "kv_cache_memory": 64 * 2**20, **config}
    pipeline_config = PipelineConfig.from_flat(config)
    worker = WorkerClient(
        partial(load_runtime, pipeline_config), in_thread=True, max_queue_size=max_queue_size
    )
    async with AsyncLLM.from_config(pipeline_config, worker=worker) as llm:
        yield llm


async def test_outputs_equal_those_of_llm() -> None:
    prompts = ["Once upon a time", [5, 6, 7], "One day"]
    params = [SamplingParams(max_new_tokens=9, temperature=1.0, seed=seed) for seed in range(3)]
    messages = [{"role": "user", "content": "What is the capital of Germany?"}]
    with LLM("demo", kv_cache_memory=64 * 2**20) as llm:
        expected = llm.generate(prompts, params, n=2, logprobs=2, prompt_logprobs=1, use_tqdm=False)
        best_outputs = llm.generate("One day", params[0], n=1, best_of=3, use_tqdm=False)
        chat_outputs = llm.chat(messages, GREEDY, use_tqdm=False)
    async with open_async_llm() as llm:
        results = await llm.generate(prompts, params, n=2, logprobs=2, prompt_logprobs=1)
        assert [result.text for result in results] == [reference.text for reference in expected]
        for actual, reference in zip(results, expected, strict=True):
            assert (actual.token_ids, actual.prompt_token_ids) == (
                reference.token_ids,
                reference.prompt_token_ids,
            )
            assert (actual.finish_reason, actual.index, actual.prompt) == (
                reference.finish_reason,
                reference.index,
                reference.prompt,
            )
            for scores, expected_scores in (
                (actual.log_probabilities, reference.log_probabilities),
                (actual.prompt_log_probabilities, reference.prompt_log_probabilities),
            ):
                assert scores is not None
                assert expected_scores is not None
                np.testing.assert_allclose(
                    scores.token_log_probabilities, expected_scores.token_log_probabilities, atol=1e-4
                )
                assert [len(top_entries) for top_entries in scores.top_log_probabilities] == [
                    len(top_entries) for top_entries in expected_scores.top_log_probabilities
                ]
        ranked_outputs = await llm.generate("One day", params[0], n=1, best_of=3)
        assert [output.text for output in ranked_outputs] == [output.text for output in best_outputs]
        assert [output.text for output in await llm.chat(messages, GREEDY)] == [
            output.text for output in chat_outputs
        ]

        chunks = [chunk async for chunk in llm.stream(messages=messages, sampling_params=GREEDY)]
        assert "".join(chunk.text for chunk in chunks) == chat_outputs[0].text
        assert [token for chunk in chunks for token in chunk.token_ids] == chat_outputs[0].token_ids
        assert [chunk.output is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].output is not None
        assert chunks[-1].output.text == chat_outputs[0].text
        stopped_chunks = [
            chunk
            async for chunk in llm.stream(messages=messages, sampling_params=SamplingParams(stop=["Germany"]))
        ]
        assert "".join(chunk.text for chunk in stopped_chunks) == "The capital of "
        assert stopped_chunks[-1].output is not None
        assert stopped_chunks[-1].output.finish_reason == "stop"
        await wait_until(lambda: llm._worker.num_outstanding == 0)


async def test_requests_end_after_a_cancelled_task_a_closed_stream_or_an_error() -> None:
    long_params = SamplingParams(max_new_tokens=900, ignore_eos=True)
    async with open_async_llm() as llm:
        worker = llm._worker
        task = asyncio.create_task(llm.generate(["a", "b", "c"], long_params))
        await wait_until(lambda: worker.num_outstanding == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: worker.num_outstanding == 0)
        async with aclosing(llm.stream("Once", long_params)) as stream:
            async for _ in stream:
                break
        await wait_until(lambda: worker.num_outstanding == 0)
        with pytest.raises(PromptTooLongError):
            await llm.generate(["a", [1] * 100_000, "c"], long_params)
        await wait_until(lambda: worker.num_outstanding == 0)


async def test_a_cancelled_task_cancels_its_requests_at_the_engine() -> None:
    engine = FakeEngine(is_paused=True)  # its requests end only if they are cancelled
    config = PipelineConfig.from_flat({"model_path": "demo"})
    async with AsyncLLM.from_config(config, worker=engine) as llm:
        task = asyncio.create_task(llm.generate(["a", "b"], GREEDY))
        await wait_until(lambda: len(engine.contexts) == 2)
        task.cancel()
        await asyncio.wait((task,))
        assert sorted(engine.cancelled_ids) == sorted(context.request_id for context in engine.contexts)


async def test_requests_beyond_the_queue_size_are_served() -> None:
    async with open_async_llm(max_queue_size=1, max_batch_size=2) as llm:
        texts = [f"Tell me {index}" for index in range(12)]
        outputs, streamed_texts = await asyncio.gather(
            llm.generate(texts, GREEDY),
            asyncio.gather(*[_join_stream(llm, text) for text in texts]),
        )
        assert [output.text for output in outputs] == list(streamed_texts)


async def _join_stream(llm: AsyncLLM, prompt: str) -> str:
    return "".join([chunk.text async for chunk in llm.stream(prompt, GREEDY)])


async def test_embeddings_equal_those_of_llm_and_generation_is_refused(tmp_path: Path) -> None:
    path = write_tiny_embedder(tmp_path / "embedder")
    texts = ["a cat", "a dog", "the weather"]
    with LLM(path) as llm:
        expected = llm.embed(texts, use_tqdm=False)
        [raw_vector] = llm.embed(["a dog"], normalize=False, use_tqdm=False)
    async with open_async_llm(model_path=str(path)) as llm:
        np.testing.assert_allclose(await llm.embed(texts), expected, atol=1e-5)
        assert abs(np.linalg.norm(raw_vector) - 1) > 0.1
        np.testing.assert_allclose(
            await llm.embed("a dog", normalize=False, truncate=True), raw_vector, atol=1e-5
        )
        assert (await llm.embed([])).shape == (0, expected.shape[1])
        with pytest.raises(TaskMismatchError):
            await llm.generate("x")


async def test_invalid_calls_are_refused() -> None:
    with pytest.raises(ConfigError, match="model_path"):
        AsyncLLM("demo", model_path="x")  # type: ignore[call-arg]
    llm = AsyncLLM("demo")
    with pytest.raises(InputError, match="not started"):
        await llm.generate("x")
    async with open_async_llm() as llm:
        with pytest.raises(InputError, match="either a prompt or messages"):
            llm.stream()
        with pytest.raises(TaskMismatchError):
            await llm.embed("x")
    with pytest.raises(InputError, match="closed"):
        await llm.generate("x")


@pytest.mark.slow
async def test_two_worker_processes_share_the_prompts_and_give_the_texts_of_llm() -> None:
    prompts = ["Once upon a time", "One day", "The cat", "A dog"]
    with LLM("demo", kv_cache_memory=64 * 2**20) as llm:
        expected = [output.text for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    async with AsyncLLM("demo", kv_cache_memory=64 * 2**20, data_parallel_size=2) as llm:
        assert [output.text for output in await llm.generate(prompts, GREEDY)] == expected
        assert [worker.stats.num_prompt_tokens > 0 for worker in llm._worker.workers] == [True, True]


async def test_two_workers_share_the_texts_and_give_the_embeddings_of_one_worker(tmp_path: Path) -> None:
    config = PipelineConfig.from_flat({"model_path": write_tiny_embedder(tmp_path)})
    workers = [WorkerClient(partial(load_runtime, config), in_thread=True) for _ in range(2)]
    texts = ["one", "two", "three", "four"]
    async with AsyncLLM.from_config(config, worker=workers[0]) as llm:
        expected = await llm.embed(texts)
    workers[0] = WorkerClient(partial(load_runtime, config), in_thread=True)
    async with AsyncLLM.from_config(config, worker=WorkerRouter(workers)) as llm:
        np.testing.assert_allclose(await llm.embed(texts), expected, atol=1e-6)
        assert [worker.stats.num_steps > 0 for worker in workers] == [True, True]
