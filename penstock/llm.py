"""`LLM`: whole batches of prompts, in this process, without a server."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeAlias
from uuid import uuid4

from penstock.answers import Answer, GenerationOutput, TextStream
from penstock.assembly import load_pipeline, load_scheduler, load_tokenizer
from penstock.errors import ConfigError, InputError, UnsupportedFeatureError
from penstock.interrupts import deferred_interrupts
from penstock.pipelines.config import PipelineConfig
from penstock.pipelines.core import (
    SamplingParams,
    TokenGeneratorRequest,
    TokenGeneratorRequestMessage,
    TokenGeneratorRequestTool,
)
from penstock.pipelines.detokenizer import Detokenizer
from penstock.progress import GenerationProgress

Prompt: TypeAlias = str | Sequence[int]
Conversation: TypeAlias = Sequence[TokenGeneratorRequestMessage]

__all__ = ["LLM", "GenerationOutput", "TextStream"]


class LLM:
    """Generates text with a model in this process.

    >>> with LLM("demo") as llm:  # doctest: +SKIP
    ...     for output in llm.generate(["Once upon a time", "One day"], SamplingParams(max_new_tokens=30)):
    ...         print(output.text)

    One thread at a time drives it; a second one is refused. After an error or Ctrl-C in the middle of a
    call everything it had begun is dropped, and the next call starts clean.

    Args:
        model: ``demo``, the folder of a checkpoint, or a model's id on the Hugging Face hub.
        **config: fields of the configuration by their flat names, as ``penstock generate --print-config``
            lists them: ``max_length=2048``, ``devices="gpu"``, ``quantization_encoding="bfloat16"``.

    Raises:
        ConfigError: unknown field, wrong type or impossible value.
        CheckpointError: the model cannot be found or loaded.
        InsufficientMemoryError: weights and the smallest useful KV cache do not fit.
    """

    def __init__(self, model: str = "demo", **config: Any) -> None:
        if "model_path" in config:
            raise ConfigError("model_path", "is the first argument of LLM: give it there alone")
        self._begin(PipelineConfig.from_flat({"model_path": model, **config}, "LLM"))

    @classmethod
    def from_config(cls, config: PipelineConfig) -> Self:
        """An LLM of a whole configuration, such as ``PipelineConfig.from_flat`` gives."""
        llm = cls.__new__(cls)
        llm._begin(config)
        return llm

    def _begin(self, config: PipelineConfig) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config)
        self.pipeline = load_pipeline(config, self.tokenizer)
        self.tokenizer.max_length = self.pipeline.memory_plan.max_length
        self._scheduler = load_scheduler(config, self.pipeline)
        self._driven = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Completes prompts, as many at once as memory allows; the others wait their turn.

        Args:
            prompts: a text, a list of texts, a list of token ids, or a list of such lists.
            sampling_params: for all prompts, or one for each. None: from the model's
                ``generation_config.json``, else OpenAI's defaults, and a fresh seed for each prompt.
            use_tqdm: show a progress bar, where standard error is a terminal.

        Returns:
            One output a prompt, in the order of the prompts; a list also for a single prompt.

        Raises:
            InputError: some prompt cannot be served; then none has been run.
        """
        prompts = _as_batch(prompts)
        params = self._params_for(len(prompts), sampling_params)
        requests = [
            self._request(index, one, prompt=prompt)
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        return self._generate(requests, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: list[TokenGeneratorRequestTool] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Answers conversations, each put into the model's chat template.

        Args:
            messages: a list of messages (``{"role": "user", "content": "Hello"}``), or a list of such lists.
            sampling_params: as for `generate`.
            tools: tools that the model may call, for the template.
            chat_template_kwargs: more variables for the template.
            use_tqdm: as for `generate`.

        Returns:
            One output a conversation, in their order; a list also for a single one.

        Raises:
            InputError: some conversation cannot be served, or the model has no chat template.
        """
        conversations = _as_conversations(messages)
        params = self._params_for(len(conversations), sampling_params)
        requests = [
            self._request(
                index, one, messages=conversation, tools=tools, chat_template_options=chat_template_kwargs
            )
            for index, (conversation, one) in enumerate(zip(conversations, params, strict=True))
        ]
        return self._generate(requests, use_tqdm)

    def stream(
        self,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        messages: Conversation | None = None,
        tools: list[TokenGeneratorRequestTool] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> TextStream:
        """The text of one prompt, or of one conversation, piece by piece as it is generated.

        No other call is served between the first piece and the last, or the stream's ``close()``.

        Raises:
            InputError: the prompt cannot be served.
        """
        if (prompt is None) == (messages is None):
            raise InputError("give either a prompt or messages")
        request = self._request(
            0,
            self._params_for(1, sampling_params)[0],
            prompt=prompt,
            messages=messages,
            tools=tools,
            chat_template_options=chat_template_kwargs,
        )
        answer = self._answer(request)
        return TextStream(answer, self._pieces(answer))

    def close(self) -> None:
        """Gives the model's memory back; twice is once. Using the LLM afterwards is an `InputError`."""
        with self._driving():
            if self._is_open:
                del self.pipeline, self._scheduler

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A stream that an error left open would be refused, and hide that error.
        if self._is_open and not (error is not None and self._driven.locked()):
            self.close()

    @property
    def _is_open(self) -> bool:
        return "pipeline" in vars(self)

    def _generate(self, requests: Sequence[TokenGeneratorRequest], use_tqdm: bool) -> list[GenerationOutput]:
        answers = [self._answer(request, len(requests)) for request in requests]
        with self._driving(), GenerationProgress(len(answers), shown=use_tqdm) as progress:
            for stepped in self._run(answers):
                progress.advance(
                    num_tokens=sum(answer.num_new_tokens for answer in stepped),
                    num_prompts=sum(answer.is_done for answer in stepped),
                )
        return [answer.output() for answer in answers]

    def _pieces(self, answer: Answer) -> Generator[str, None, None]:
        with self._driving():
            for _ in self._run([answer]):
                if answer.new_text:
                    yield answer.new_text

    def _run(self, answers: Sequence[Answer]) -> Iterator[list[Answer]]:
        """Runs contexts to their end; yields after each step the answers that it moved on."""
        running = {answer.context.request_id: answer for answer in answers}
        try:
            with deferred_interrupts():
                for answer in answers:
                    self._scheduler.submit(answer.context)
            while running:
                with deferred_interrupts():
                    responses = self._scheduler.step(self.config.max_num_steps)
                for failure in self._scheduler.failures.values():
                    raise failure
                stepped = [running[request_id] for request_id in responses]
                for answer, response in zip(stepped, responses.values(), strict=True):
                    answer.take(response)
                    if answer.is_done:
                        del running[answer.context.request_id]
                        if not response.is_done:  # a stop string, of which the scheduler knows nothing
                            self._scheduler.cancel(answer.context.request_id)
                yield stepped
        finally:
            with deferred_interrupts():
                self._drop(running)

    def _drop(self, request_ids: Iterable[str]) -> None:
        """Ends what has not ended, so that the next call starts clean."""
        for request_id in request_ids:
            self._scheduler.cancel(request_id)
        self._scheduler.failures.clear()
        if self._scheduler.has_work:
            self._scheduler.step()  # takes the cancels, and finds nothing left to run
        assert not self._scheduler.has_work, "contexts are left behind"

    def _request(self, index: int, params: SamplingParams, **what: Any) -> TokenGeneratorRequest:
        name = self.config.model.served_model_name or self.config.model.model_path
        return TokenGeneratorRequest(uuid4().hex, index, name, sampling_params=params, **what)

    def _answer(self, request: TokenGeneratorRequest, num_requests: int = 1) -> Answer:
        if not self._is_open:
            raise InputError("this LLM is closed: make a new one")
        try:
            context = self.tokenizer.build_context(request)
        except InputError as error:
            if num_requests > 1:
                error.add_note(f"in prompt {request.index + 1} of {num_requests}")
            raise
        stop = context.sampling_params.stop
        if context.sampling_params.detokenize:
            return Answer(context, Detokenizer(self.tokenizer, stop or ()))
        if stop:
            raise InputError("stop strings are matched on text: they need detokenize=True")
        return Answer(context, None)

    def _params_for(
        self, num_prompts: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            return [self.config.default_sampling_params() for _ in range(num_prompts)]
        if isinstance(given, SamplingParams):
            return [given] * num_prompts
        params = list(given) if isinstance(given, Sequence) else [given]
        for one in params:
            if not isinstance(one, SamplingParams):
                raise InputError(f"sampling_params must be SamplingParams, was {type(one).__name__}")
        if len(params) != num_prompts:
            raise InputError(f"{len(params)} sampling_params were given for {num_prompts} prompts")
        return params

    @contextmanager
    def _driving(self) -> Iterator[None]:
        """Keeps all others out: a second thread in the kernels would slow both down threefold."""
        if not self._driven.acquire(blocking=False):
            raise UnsupportedFeatureError(
                "using one LLM from two places at once",
                "finish or close its open stream first, and let one thread drive it: "
                "a list of prompts is run as one batch",
            )
        try:
            yield
        finally:
            self._driven.release()


_NO_BATCH = (str, bytes, bytearray, memoryview, Mapping, Set)
"""What can be iterated over, and yet is one prompt: a text, or one that the tokenizer refuses."""


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """A list of prompts of what may be a single one. The tokenizer looks at each."""
    if isinstance(prompts, _NO_BATCH) or not isinstance(prompts, Iterable):
        return [prompts]
    batch = list(prompts)
    return [batch] if batch and all(_is_token(one) for one in batch) else batch


def _is_token(value: object) -> bool:
    return not isinstance(value, str | bytes | Iterable)


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Any]:
    """A list of conversations of what may be a single one."""
    given: Any = messages
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InputError(f"messages must be a list of messages or of such lists, was {given!r}")
    conversations = list(given)
    return [conversations] if any(isinstance(one, Mapping) for one in conversations) else conversations
