"""`AsyncLLM`: the interface of asyncio programs to a model. The model runs in another process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from penstock.assembly import close_tokenizer, load_serving_tokenizer
from penstock.config import PipelineConfig, PipelineOptions
from penstock.engines import make_engine
from penstock.errors import ConfigError, InputError, TaskMismatchError
from penstock.llm.async_runner import AsyncRunner, gather_all
from penstock.llm.async_speech import AsyncSpeechMethods
from penstock.llm.embeddings import EmbeddingsInput, as_inputs, is_single
from penstock.llm.images import Image, images_per_prompt
from penstock.llm.outputs import GenerationOutput, OutputBuilder, OutputOptions, best_first
from penstock.llm.prompts import ChatMessages, Prompt, ToolDescriptions, params_for_each
from penstock.llm.text_requests import BatchFields, TextFields, make_builders, text_request
from penstock.pipelines.core import (
    EmbeddingsGenerationRequest,
    EmbeddingsResponse,
    Grammar,
    PipelineTask,
    PoolingType,
    SamplingParams,
)
from penstock.pipelines.core.embeddings import EmbeddingsFields, EmbeddingsOptions
from penstock.pipelines.core.parameter_hints import suggest_parameters
from penstock.worker.engine_client import EngineClient

T = TypeVar("T")

_NUM_THREADS = 2  # threads that encode prompts and render templates


@dataclass(frozen=True, slots=True)
class StreamedOutput:
    """A new piece of the output of one prompt."""

    text: str
    """The new text. The concatenated texts of all pieces are the text of the output."""
    token_ids: list[int]
    """The new tokens."""
    output: GenerationOutput | None = None
    """The finished output in the last piece; None in earlier pieces."""


class AsyncLLM(AsyncSpeechMethods):
    """Generates text or speech, or computes embeddings, from an asyncio program.

    >>> async with AsyncLLM("demo") as llm:  # doctest: +SKIP
    ...     async for piece in llm.stream("Once upon a time"):
    ...         print(piece.text, end="", flush=True)

    The model runs in a worker process. Any number of tasks may call the methods concurrently, and their
    requests are batched. Cancelling a task cancels its requests. If the worker process ends unexpectedly, its
    requests raise `UnavailableError`, and a new worker process starts. Requests before `start` and after
    `close` raise `InputError`.

    The worker process does not import the main module of the program.

    Args:
        model: ``demo``, the folder of a checkpoint, or a model's id on the Hugging Face hub.
        **config: fields of the configuration by their flat names (`PipelineOptions`).

    Raises:
        ConfigError: unknown field, wrong type or impossible value.
    """

    def __init__(self, model: str | PathLike[str] = "demo", **config: Unpack[PipelineOptions]) -> None:
        options: dict[str, object] = {**config}
        if "model_path" in options:
            raise ConfigError("model_path", "is the first argument of AsyncLLM: leave out model_path")
        self._initialize(PipelineConfig.from_flat({"model_path": model, **options}, "AsyncLLM"), None)

    @classmethod
    def from_config(cls, config: PipelineConfig, *, worker: EngineClient | None = None) -> Self:
        """Return an AsyncLLM with a complete configuration.

        Args:
            config: the configuration.
            worker: the engine client, not launched yet; None creates a worker process.
        """
        llm = cls.__new__(cls)
        llm._initialize(config, worker)
        return llm

    def _initialize(self, config: PipelineConfig, worker: EngineClient | None) -> None:
        self.config = config
        self.tokenizer: Any = None
        """The tokenizer of the model's task; None before `start` and after `close`."""
        self._worker = make_engine(config) if worker is None else worker
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="penstock-async")
        self._runner = AsyncRunner(self._worker)

    async def start(self) -> None:
        """Load the model. Does nothing if the model is loaded.

        Raises:
            CheckpointError: the model cannot be found or loaded.
            InsufficientMemoryError: weights and the smallest permitted KV cache do not fit.
        """
        if self.tokenizer is not None:
            return
        self._worker.launch()
        start_task = asyncio.ensure_future(self._worker.start())
        try:
            tokenizer = await self._run_in_pool(lambda: load_serving_tokenizer(self.config))
            await start_task
        except BaseException:
            start_task.cancel()
            await asyncio.gather(start_task, return_exceptions=True)
            await self._worker.stop(0)
            raise
        tokenizer.max_length = self._worker.info.max_length
        self.tokenizer = tokenizer

    async def close(self, grace: float = 0) -> None:
        """End the worker process. Requests that are still running after `grace` seconds fail.

        A closed AsyncLLM cannot be started again.
        """
        await self._worker.stop(grace)
        if self.tokenizer is not None:
            close_tokenizer(self.tokenizer)
        self.tokenizer = None
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @suggest_parameters
    def stream(
        self,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        messages: ChatMessages | None = None,
        tools: ToolDescriptions | None = None,
        chat_template_kwargs: dict[str, object] | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
        response_format: Mapping[str, object] | None = None,
        adapter: str | None = None,
        priority: int = 0,
        images: Image | Sequence[Image] | None = None,
    ) -> AsyncGenerator[StreamedOutput, None]:
        """Yield the output of one prompt or conversation in pieces.

        See `LLM.generate` and `LLM.chat` for the parameters. The last piece contains the whole output.
        Closing the generator, or cancelling its task, cancels the request.

        Raises:
            InputError: the prompt cannot be served, or not exactly one of prompt and messages is given.
            TaskMismatchError: the model does not generate text.
            UnavailableError: the worker process ended during the call, or accepts no requests.
        """
        if (prompt is None) == (messages is None):
            raise InputError("give either a prompt or messages")
        (prompt_images,) = images_per_prompt(images, 1, is_one_prompt=True)
        fields: TextFields = {
            "prompt": prompt,
            "images": prompt_images,
            "messages": messages,
            "tools": tools,
            "chat_template_options": chat_template_kwargs,
            "grammar": grammar,
            "response_format": response_format,
            "adapter": adapter,
            "priority": priority,
        }
        options = OutputOptions.from_arguments(1, None, logprobs, prompt_logprobs)
        return self._stream(sampling_params, options, fields)

    @suggest_parameters
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        best_of: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        response_format: Mapping[str, object] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        images: Image | Sequence[Image] | None = None,
    ) -> list[GenerationOutput]:
        """Complete prompts. See `LLM.generate` for the arguments.

        Raises:
            InputError: a prompt cannot be served; all other prompts are cancelled.
            TaskMismatchError: the model does not generate text.
            UnavailableError: the worker process ended during the call, or accepts no requests.
        """
        options = OutputOptions.from_arguments(n, best_of, logprobs, prompt_logprobs)
        batch = BatchFields(
            response_format=response_format, grammar=grammar, adapter=adapter, priority=priority
        )
        return await self._generate(batch.for_prompts(prompts, images), sampling_params, options)

    @suggest_parameters
    async def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: ToolDescriptions | None = None,
        chat_template_kwargs: dict[str, object] | None = None,
        *,
        n: int = 1,
        best_of: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        response_format: Mapping[str, object] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[GenerationOutput]:
        """Generate the next message of conversations. See `LLM.chat` for the arguments.

        Raises:
            InputError: a conversation cannot be served; all other conversations are cancelled.
            TaskMismatchError: the model does not generate text.
            UnavailableError: the worker process ended during the call, or accepts no requests.
        """
        options = OutputOptions.from_arguments(n, best_of, logprobs, prompt_logprobs)
        batch = BatchFields(
            response_format=response_format, grammar=grammar, adapter=adapter, priority=priority
        )
        fields = batch.for_conversations(messages, tools, chat_template_kwargs)
        return await self._generate(fields, sampling_params, options)

    @suggest_parameters
    async def embed(
        self,
        inputs: EmbeddingsInput | Sequence[EmbeddingsInput],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        pooling: PoolingType | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> npt.NDArray[np.floating]:
        """Return the dense embeddings of texts, like `LLM.embed`.

        Args:
            inputs: a text, a list of texts, a list of token ids, or a list of such lists.
            prompt: a text that is placed before each input.
            prompt_name: the name of a prompt of the checkpoint.
            pooling: the pooling to use instead of the checkpoint's pooling.
            dimensions: number of leading dimensions to return; None for all.
            normalize: whether to scale the vectors to length 1; None for the checkpoint's setting.
            truncate: whether to cut inputs that exceed the maximum length.
            adapter: the LoRA adapter of all inputs.

        Returns:
            ``[n, E]`` float32, in the order of the inputs; ``[E]`` for a single input.

        Raises:
            InputError: an input cannot be served; all other inputs are cancelled.
            TaskMismatchError: the model computes no embeddings.
            UnavailableError: the worker process ended during the call, or accepts no requests.
        """
        self._check_task("AsyncLLM.embed", PipelineTask.EMBEDDINGS_GENERATION)
        batch = as_inputs(inputs)
        if not batch:
            return np.zeros((0, dimensions or self._worker.info.embedding_size), np.float32)
        options: EmbeddingsOptions = {
            "prompt": prompt,
            "prompt_name": prompt_name,
            "pooling": pooling,
            "dimensions": dimensions,
            "normalize": normalize,
            "truncate": truncate,
        }
        fields: list[EmbeddingsFields] = [
            {**options, "input": request, "outputs": ("dense",), "adapter": adapter} for request in batch
        ]
        responses = await gather_all([partial(self._embedding, field) for field in fields])
        vectors = np.stack([response.embeddings for response in responses])
        return vectors[0] if is_single(inputs) else vectors

    async def _generate(
        self,
        fields: Sequence[TextFields],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: OutputOptions,
    ) -> list[GenerationOutput]:
        """Run one request for each entry of `fields`. Return the outputs in the order of the entries."""
        params = params_for_each(self.config, sampling_params, len(fields))
        calls = [
            partial(self._outputs, prompt_params, options, prompt_fields)
            for prompt_params, prompt_fields in zip(params, fields, strict=True)
        ]
        return [output for outputs in await gather_all(calls) for output in outputs]

    async def _outputs(
        self, params: SamplingParams, options: OutputOptions, fields: TextFields
    ) -> list[GenerationOutput]:
        """Run one prompt and return its outputs."""
        builders = await self._builders(params, options, fields)
        cached_counts = await gather_all([partial(self._run, builder) for builder in builders])
        return [
            replace(output, num_cached_tokens=min(cached_counts)) for output in best_first(builders, options)
        ]

    async def _run(self, builder: OutputBuilder) -> int:
        """Run the context of one builder to completion. Return the number of cached prompt tokens."""
        num_cached = 0
        async with aclosing(self._runner.deltas(builder)) as deltas:
            async for delta in deltas:
                num_cached = delta.num_cached_tokens
        return num_cached

    async def _stream(
        self, params: SamplingParams | None, options: OutputOptions, fields: TextFields
    ) -> AsyncGenerator[StreamedOutput, None]:
        (params,) = params_for_each(self.config, params, 1)
        (builder,) = await self._builders(params, options, fields)
        async with aclosing(self._runner.deltas(builder)) as deltas:
            async for delta in deltas:
                output = None
                if builder.is_done:
                    output = replace(builder.output(options), num_cached_tokens=delta.num_cached_tokens)
                tokens = builder.token_ids[-builder.num_new_tokens :] if builder.num_new_tokens else []
                if builder.new_text or tokens or output is not None:
                    yield StreamedOutput(builder.new_text, tokens, output)

    async def _builders(
        self, params: SamplingParams, options: OutputOptions, fields: TextFields
    ) -> list[OutputBuilder]:
        """Encode a prompt. Return one builder for each choice."""
        self._check_task("AsyncLLM.generate", PipelineTask.TEXT_GENERATION)

        def build() -> list[OutputBuilder]:
            request = text_request(self.config.model.name, 0, params, options, **fields)
            context = self.tokenizer.build_context(request, stops_as_tokens=False)
            return make_builders(self.tokenizer, context, options)

        return await self._run_in_pool(build)

    async def _embedding(self, fields: EmbeddingsFields) -> EmbeddingsResponse:
        request = EmbeddingsGenerationRequest(id=uuid4().hex, model_name=self.config.model.name, **fields)
        context = await self._run_in_pool(lambda: self.tokenizer.build_embeddings_context(request))
        generation = await self._runner.submit(context)
        try:
            embeddings = [delta.embeddings async for delta in generation if delta.embeddings is not None]
        finally:
            generation.cancel()
        return embeddings[-1]

    async def _run_in_pool(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def _check_task(self, method: str, task: PipelineTask) -> None:
        if self.tokenizer is None:
            raise InputError("this AsyncLLM is not started, or it is closed: use 'async with' or start()")
        model_task = self._worker.info.task
        if model_task is not task:
            raise TaskMismatchError(method, task.option, model_task.option)
