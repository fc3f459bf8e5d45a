"""`LLM`: whole batches of prompts, in this process, without a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from os import PathLike
from types import TracebackType
from typing import Any, Self, Unpack
from uuid import uuid4

from penstock.assembly import (
    CATALOG,
    STREAMING_LATENCY_BUDGET,
    Catalog,
    load_pipeline,
    load_scheduler,
    load_tokenizer,
    memory_of_weights,
)
from penstock.config import PipelineConfig, PipelineOptions
from penstock.errors import ConfigError, InputError, TaskMismatchError, UnsupportedFeatureError
from penstock.host.garbage_collection import gc_disabled
from penstock.host.interrupts import deferred_interrupts
from penstock.host.progress import GenerationProgress
from penstock.llm.beam_search import BeamOptions, EarlyStopping, search
from penstock.llm.outputs import GenerationOutput, OutputBuilder, OutputOptions, TextStream, best_first
from penstock.llm.prompts import (
    Conversation,
    Prompt,
    Tools,
    as_batch,
    as_conversations,
    broadcast,
    params_for_each,
)
from penstock.pipelines.core import (
    Grammar,
    PipelineTask,
    SamplingParams,
    TextContext,
    TokenGeneratorRequest,
)
from penstock.pipelines.core.choices import choice_contexts
from penstock.pipelines.core.parameter_hints import hinting
from penstock.text.detokenizer import Detokenizer

BATCH_LATENCY_BUDGET = 0.1
"""Seconds that one step may take when outputs are returned at the end, not streamed. Streams use
`STREAMING_LATENCY_BUDGET`."""
_POLL = 0.001  # seconds between two looks at contexts that wait, for a grammar to be compiled perhaps

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
        **config: fields of the configuration by their flat names (`PipelineOptions`), as
            ``penstock generate --print-config`` lists them, such as ``max_length=2048``,
            ``devices="gpu"``, ``quantization_encoding="bfloat16"``.

    Raises:
        ConfigError: unknown field, wrong type or impossible value.
        CheckpointError: the model cannot be found or loaded.
        InsufficientMemoryError: weights and the smallest useful KV cache do not fit.
        ForkedProcessError: this process was forked from one that had loaded a model.
    """

    def __init__(self, model: str | PathLike[str] = "demo", **config: Unpack[PipelineOptions]) -> None:
        given: dict[str, Any] = {**config}
        if "model_path" in given:
            raise ConfigError("model_path", "is the first argument of LLM: give it there alone")
        self._begin(PipelineConfig.from_flat({"model_path": model, **given}, "LLM"), CATALOG)

    @classmethod
    def from_config(cls, config: PipelineConfig, *, catalog: Catalog = CATALOG) -> Self:
        """Return an LLM of a whole configuration, such as ``PipelineConfig.from_flat`` gives.

        Args:
            config: the configuration.
            catalog: the architectures and tasks to choose from.
        """
        llm = cls.__new__(cls)
        llm._begin(config, catalog)
        return llm

    def _begin(self, config: PipelineConfig, catalog: Catalog) -> None:
        self.config = config
        with gc_disabled(), memory_of_weights(config) as prefaulted:
            self.tokenizer = load_tokenizer(config, catalog)
            self.pipeline: Any = load_pipeline(config, self.tokenizer, catalog, prefaulted)
            """The `penstock.pipelines.task_pipeline.TaskPipeline` of the model's task."""
        self.tokenizer.max_length = self.pipeline.memory_plan.max_length
        self._scheduler = load_scheduler(config, self.pipeline)
        self._driven = threading.Lock()

    @hinting
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        n: int = 1,
        best_of: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        response_format: Mapping[str, Any] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[GenerationOutput]:
        """Completes prompts, as many at once as memory allows; the others wait their turn.

        Args:
            prompts: a text, a list of texts, a list of token ids, or a list of such lists.
            sampling_params: for all prompts, or one for each. None: from the model's
                ``generation_config.json``, else OpenAI's defaults, and a fresh seed for each prompt.
            use_tqdm: show a progress bar, where standard error is a terminal.
            n: answers to each prompt, which is computed once. Answer ``i`` draws from a seed that follows
                from the prompt's and ``i``; answer 0 is that of ``n=1``.
            best_of: make this many, and return the ``n`` of the highest mean log probability, best first.
            logprobs: report log probabilities of the generated tokens, and of this many of the most probable
                ones in place of each; 0 reports the generated ones alone.
            prompt_logprobs: the same for the tokens of the prompt. It is computed whole then: blocks that the
                prefix cache has are not used.
            grammar: what the outputs must look like, for all prompts or one for each.
            response_format: the same as OpenAI has it: ``{"type": "json_schema", "json_schema": {...}}``.
            adapter: the LoRA adapter to use, for all prompts or one for each.
            priority: who comes first where not all fit; a higher number. For all prompts or one for each.

        Returns:
            ``n`` outputs a prompt, in the order of the prompts; a list also for a single prompt.

        Raises:
            InputError: some prompt cannot be served; then none has been run.
        """
        self._check_task("LLM.generate", PipelineTask.TEXT_GENERATION)
        return self._generate(
            [{"prompt": prompt} for prompt in as_batch(prompts)],
            sampling_params,
            OutputOptions.of(n, best_of, logprobs, prompt_logprobs),
            use_tqdm,
            response_format=response_format,
            grammar=grammar,
            adapter=adapter,
            priority=priority,
        )

    @hinting
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Tools | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = True,
        *,
        n: int = 1,
        best_of: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        response_format: Mapping[str, Any] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[GenerationOutput]:
        """Answers conversations, each put into the model's chat template.

        Args:
            messages: a list of messages (``{"role": "user", "content": "Hello"}``), or a list of such lists.
            sampling_params: as for `generate`.
            tools: tools that the model may call, for the template.
            chat_template_kwargs: more variables for the template.
            use_tqdm: as for `generate`, like all that follow.
            n: answers to each conversation.
            best_of: of how many they are the best.
            logprobs: of how many of the most probable tokens to report log probabilities.
            prompt_logprobs: the same for the prompt.
            grammar: what the answers must look like.
            response_format: the same in OpenAI's words.
            adapter: the LoRA adapter to use.
            priority: who comes first.

        Returns:
            ``n`` outputs a conversation, in their order; a list also for a single one.

        Raises:
            InputError: some conversation cannot be served, or the model has no chat template.
        """
        self._check_task("LLM.chat", PipelineTask.TEXT_GENERATION)
        more = {"tools": tools, "chat_template_options": chat_template_kwargs}
        return self._generate(
            [{"messages": conversation, **more} for conversation in as_conversations(messages)],
            sampling_params,
            OutputOptions.of(n, best_of, logprobs, prompt_logprobs),
            use_tqdm,
            response_format=response_format,
            grammar=grammar,
            adapter=adapter,
            priority=priority,
        )

    @hinting
    def stream(
        self,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        messages: Conversation | None = None,
        tools: Tools | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
        response_format: Mapping[str, Any] | None = None,
        adapter: str | None = None,
    ) -> TextStream:
        """The text of one prompt, or of one conversation, piece by piece as it is generated.

        No other call is served between the first piece and the last, or the stream's ``close()``. Parameters
        are those of `generate` and `chat`; log probabilities are in the stream's ``output``.

        Raises:
            InputError: the prompt cannot be served.
        """
        self._check_task("LLM.stream", PipelineTask.TEXT_GENERATION)
        if (prompt is None) == (messages is None):
            raise InputError("give either a prompt or messages")
        report = OutputOptions.of(1, None, logprobs, prompt_logprobs)
        request = self._request(
            0,
            params_for_each(self.config, sampling_params, 1)[0],
            report,
            prompt=prompt,
            messages=messages,
            tools=tools,
            chat_template_options=chat_template_kwargs,
            grammar=grammar,
            response_format=response_format,
            adapter=adapter,
        )
        (answer,) = self._answers(request, report)
        return TextStream(answer, self._pieces(answer), report)

    @hinting
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        num_beams: int = 4,
        num_return_sequences: int = 1,
        max_new_tokens: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        ignore_eos: bool = False,
        adapter: str | None = None,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """The most probable completions that a search with several beams finds, as transformers' generate.

        Args:
            prompts: as for `generate`.
            num_beams: completions followed at once, for each prompt.
            num_return_sequences: how many of them to return.
            max_new_tokens: the most tokens of a completion; None leaves it to the model's maximum length.
            length_penalty: above 0 favours long completions, below 0 short ones.
            early_stopping: when to end (`BeamOptions.early_stopping`).
            ignore_eos: let all completions grow to the maximum length.
            adapter: the LoRA adapter to use.
            use_tqdm: as for `generate`.

        Returns:
            ``num_return_sequences`` outputs a prompt, the best first, in the order of the prompts. Each has
            its ``score``, and the log probabilities of its tokens.

        Raises:
            InputError: some prompt cannot be served; then none has been run.
            InsufficientBlocksError: the beams of one prompt do not fit the KV cache.
        """
        self._check_task("LLM.beam_search", PipelineTask.TEXT_GENERATION)
        options = BeamOptions(
            num_beams=num_beams,
            num_return_sequences=num_return_sequences,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        if self.config.speculative.method is not None:
            raise UnsupportedFeatureError(
                "beam search with speculative decoding", "open the model without a speculative_method"
            )
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
        batch = as_batch(prompts)
        requests = [
            self._request(index, params, OutputOptions(), prompt=prompt, adapter=adapter)
            for index, prompt in enumerate(batch)
        ]
        contexts = [self._context(request, len(batch)) for request in requests]
        plan = self.pipeline.memory_plan
        limits = (plan.max_batch_size, plan.max_batch_input_tokens)
        outputs: list[GenerationOutput] = []
        with self._driving(), GenerationProgress(len(contexts), shown=use_tqdm) as progress:
            for context, beams in search(self.pipeline, contexts, options, *limits):
                for index, beam in enumerate(beams):
                    outputs.append(GenerationOutput.of_beam(context, index, beam, self.tokenizer))
                progress.advance(num_tokens=sum(len(beam.token_ids) for beam in beams), num_prompts=1)
        return outputs

    def close(self) -> None:
        """Gives the model's memory back; twice is once. Using the LLM afterwards is an `InputError`."""
        with self._driving():
            if self._is_open:
                self.pipeline.close()
                del self.pipeline, self._scheduler

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A stream that an error left open would be refused, and hide that error.
        if self._is_open and not (error is not None and self._driven.locked()):
            self.close()

    def _check_task(self, method: str, task: PipelineTask) -> None:
        """Refuse a call of a method that belongs to another task than the model's.

        Raises:
            TaskMismatchError: names both tasks.
        """
        served = self.config.model.pipeline_task
        if served is not task:
            raise TaskMismatchError(method, task.option, served.option)

    @property
    def _is_open(self) -> bool:
        return "pipeline" in vars(self)

    def _generate(
        self,
        prompts: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        report: OutputOptions,
        use_tqdm: bool,
        *,
        response_format: Mapping[str, Any] | None,
        **options: Any,
    ) -> list[GenerationOutput]:
        """``options`` are fields of the requests, each one value for all prompts or a list of them."""
        num = len(prompts)
        params = params_for_each(self.config, sampling_params, num)
        each = {name: broadcast(name, value, num) for name, value in options.items()}
        requests = [
            self._request(
                index,
                params[index],
                report,
                **prompts[index],
                response_format=response_format,
                **{name: values[index] for name, values in each.items()},
            )
            for index in range(num)
        ]
        answers = [self._answers(request, report, num) for request in requests]
        together = list(chain.from_iterable(answers))
        progress = GenerationProgress(len(together), shown=use_tqdm)
        # For all steps at once: to set the handler anew for each takes as long as a tenth of one's Python.
        with self._driving(), deferred_interrupts() as let_through, progress:
            for stepped in self._run(together, seconds=BATCH_LATENCY_BUDGET):
                let_through()
                progress.advance(
                    num_tokens=sum(answer.num_new_tokens for answer in stepped),
                    num_prompts=sum(answer.is_done for answer in stepped),
                )
        return [output for choices in answers for output in best_first(choices, report)]

    def _pieces(self, answer: OutputBuilder) -> Generator[str, None, None]:
        with self._driving():
            for _ in self._run([answer], seconds=STREAMING_LATENCY_BUDGET):
                if answer.new_text:
                    yield answer.new_text

    def _run(self, answers: Sequence[OutputBuilder], *, seconds: float) -> Iterator[list[OutputBuilder]]:
        """Runs contexts to their end; yields the answers that have moved on, about every so many seconds or
        after every step, whichever is rarer."""
        running = {answer.context.request_id: answer for answer in answers}
        try:
            with deferred_interrupts():
                for answer in answers:
                    self._scheduler.submit(answer.context)
            while running:
                with deferred_interrupts():
                    responses = self._scheduler.step(self.pipeline.num_steps_for(seconds))
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
                if not stepped:
                    time.sleep(_POLL)
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

    def _request(
        self, index: int, params: SamplingParams, report: OutputOptions, **what: Any
    ) -> TokenGeneratorRequest:
        name = self.config.model.name
        return TokenGeneratorRequest(
            uuid4().hex,
            index,
            name,
            sampling_params=params,
            logprobs=report.num_top,
            echo=report.prompt_logprobs is not None,
            **what,
        )

    def _context(self, request: TokenGeneratorRequest, num_requests: int) -> TextContext:
        if not self._is_open:
            raise InputError("this LLM is closed: make a new one")
        self.pipeline.session.check_process()
        try:
            context: TextContext = self.tokenizer.build_context(request, stops_as_tokens=False)
        except InputError as error:
            if num_requests > 1:
                error.add_note(f"in prompt {request.index + 1} of {num_requests}")
            raise
        return context

    def _answers(
        self, request: TokenGeneratorRequest, report: OutputOptions, num_requests: int = 1
    ) -> list[OutputBuilder]:
        """One for each choice; the first alone echoes the prompt, so that the others can share it."""
        contexts = choice_contexts(self._context(request, num_requests), report.num_choices)
        for context in contexts[1:]:
            context.log_probabilities_echo = False
        stop = contexts[0].sampling_params.stop
        if contexts[0].sampling_params.detokenize:
            prompt = contexts[0].prompt_tokens
            return [
                OutputBuilder(context, Detokenizer(self.tokenizer, stop or (), prompt=prompt))
                for context in contexts
            ]
        if stop:
            raise InputError("stop strings are matched on text: they need detokenize=True")
        return [OutputBuilder(context, None) for context in contexts]

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
