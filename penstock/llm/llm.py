"""`LLM`: runs a model in this process, without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, ClassVar, Self, Unpack

from penstock.assembly import (
    CATALOG,
    Catalog,
    close_tokenizer,
    load_pipeline,
    load_scheduler,
    load_tokenizer,
    prefault_weights,
)
from penstock.config import PipelineConfig, PipelineOptions
from penstock.errors import ConfigError, InputError, TaskMismatchError, UnsupportedFeatureError
from penstock.host.garbage_collection import gc_disabled
from penstock.host.progress import GenerationProgress
from penstock.llm.batch_runner import BatchRunner
from penstock.llm.beam_search import BeamOptions, EarlyStopping, search
from penstock.llm.embeddings import EmbeddingsMethods
from penstock.llm.images import Image, images_per_prompt
from penstock.llm.outputs import GenerationOutput, OutputOptions, TextStream
from penstock.llm.prompts import ChatMessages, Prompt, ToolDescriptions, as_batch, params_for_each
from penstock.llm.speech import Speech, SpeechMethods, SpeechStream
from penstock.llm.text_requests import BatchFields, TextRequests
from penstock.pipelines.core import (
    Grammar,
    PipelineTask,
    SamplingParams,
)
from penstock.pipelines.core.parameter_hints import suggest_parameters

__all__ = ["LLM", "GenerationOutput", "Speech", "SpeechStream", "TextStream"]


class LLM(EmbeddingsMethods, SpeechMethods):
    """Runs a model in this process: generates text, embeddings or speech.

    >>> with LLM("demo") as llm:  # doctest: +SKIP
    ...     for output in llm.generate(["Once upon a time", "One day"], SamplingParams(max_new_tokens=30)):
    ...         print(output.text)

    A call while another call runs or a stream is open raises `UnsupportedFeatureError`.
    An error or Ctrl-C during a call cancels its requests, and the next call starts with an empty scheduler.

    Args:
        model: ``demo``, the folder of a checkpoint, or a model's id on the Hugging Face hub.
        **config: fields of the configuration by their flat names (`PipelineOptions`), such as
            ``max_length=2048``. ``penstock generate --print-config`` lists them.

    Raises:
        ConfigError: unknown field, wrong type or impossible value.
        CheckpointError: the model cannot be found or loaded.
        InsufficientMemoryError: weights and the smallest permitted KV cache do not fit.
        ForkedProcessError: this process was forked from a process with a loaded model.
    """

    _runner_class: ClassVar[type[BatchRunner]] = BatchRunner

    def __init__(self, model: str | PathLike[str] = "demo", **config: Unpack[PipelineOptions]) -> None:
        options: dict[str, object] = {**config}
        if "model_path" in options:
            raise ConfigError("model_path", "is the first argument of LLM: leave out model_path")
        self._initialize(PipelineConfig.from_flat({"model_path": model, **options}, "LLM"), CATALOG)

    @classmethod
    def from_config(cls, config: PipelineConfig, *, catalog: Catalog = CATALOG) -> Self:
        """Return an LLM with a complete configuration, such as the result of ``PipelineConfig.from_flat``.

        Args:
            config: the configuration.
            catalog: the architectures and tasks to choose from.
        """
        llm = cls.__new__(cls)
        llm._initialize(config, catalog)
        return llm

    def _initialize(self, config: PipelineConfig, catalog: Catalog) -> None:
        self.config = config
        self.tokenizer: Any
        """The tokenizer of the model's task."""
        with gc_disabled(), prefault_weights(config) as prefaulted:
            self.tokenizer = load_tokenizer(config, catalog)
            self.pipeline: Any = load_pipeline(config, self.tokenizer, catalog, prefaulted)
            """The `penstock.pipelines.task_pipeline.TaskPipeline` of the model's task."""
        self.tokenizer.max_length = self.pipeline.memory_plan.max_length
        self._scheduler = load_scheduler(config, self.pipeline)
        self._runner = self._runner_class(self.pipeline, self._scheduler)
        self._text = TextRequests(config, self.tokenizer, self._runner)

    @suggest_parameters
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
        response_format: Mapping[str, object] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        images: Image | Sequence[Image] | None = None,
    ) -> list[GenerationOutput]:
        """Complete prompts in batches as large as the memory allows.

        Args:
            prompts: a text, a list of texts, a list of token ids, or a list of such lists.
            sampling_params: one value for all prompts, or one for each. None stands for the values of the
                model's ``generation_config.json`` (unless ``use_generation_config`` is false), OpenAI's
                defaults for missing values, and a new seed for each prompt.
            use_tqdm: show a progress bar if standard error is a terminal.
            n: number of outputs for each prompt. The prompt is computed once. The seed of output ``i`` is
                derived from the prompt's seed and ``i``; output 0 equals the output of ``n=1``.
            best_of: generate this many outputs and return the ``n`` with the highest mean log probability,
                best first.
            logprobs: number of most probable tokens at each position whose log probabilities are returned, in
                addition to the log probability of the generated token.
            prompt_logprobs: number of most probable tokens at each position of the prompt; see ``logprobs``.
                The prompt is then computed without the prefix cache.
            grammar: the grammar of the outputs: one grammar for all prompts, or one for each.
            response_format: the grammar of all outputs in OpenAI's form, such as
                ``{"type": "json_schema", "json_schema": {...}}``.
            adapter: the LoRA adapter: one name for all prompts, or one for each.
            priority: prompts with a higher number are scheduled first: one number for all prompts, or one for
                each.
            images: the images of the prompt for a model that reads images: one image or a list. An image is a
                PIL image, an array ``[H, W, 3]`` or ``[H, W]`` of uint8, a path, or the bytes of a file. For
                a list of prompts, ``images`` is a list with one entry for each prompt. The prompt must
                contain the model's placeholder, such as ``<image>``, for each image.

        Returns:
            ``n`` outputs for each prompt, in the order of the prompts.

        Raises:
            InputError: a prompt cannot be served; all other prompts are cancelled.
            TaskMismatchError: the model does not generate text.
        """
        self._check_task("LLM.generate", PipelineTask.TEXT_GENERATION)
        batch = BatchFields(
            response_format=response_format, grammar=grammar, adapter=adapter, priority=priority
        )
        options = OutputOptions.from_arguments(n, best_of, logprobs, prompt_logprobs)
        return self._text.generate(batch.for_prompts(prompts, images), sampling_params, options, use_tqdm)

    @suggest_parameters
    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: ToolDescriptions | None = None,
        chat_template_kwargs: dict[str, object] | None = None,
        use_tqdm: bool = True,
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
        """Generate the next message of conversations, formatted with the model's chat template.

        See `generate` for the other parameters.

        Args:
            messages: a list of messages (``{"role": "user", "content": "Hello"}``), or a list of such lists.
                The content may be a list of parts: ``{"type": "text", "text": ...}`` and, for a model that
                reads images, ``{"type": "image", "image": ...}`` with an image as in `generate`.
            tools: descriptions of functions that the model may call, for the template.
            chat_template_kwargs: further variables of the template.

        Returns:
            ``n`` outputs for each conversation, in the order of the conversations.

        Raises:
            InputError: a conversation cannot be served, or the model has no chat template.
            TaskMismatchError: the model does not generate text.
        """
        self._check_task("LLM.chat", PipelineTask.TEXT_GENERATION)
        batch = BatchFields(
            response_format=response_format, grammar=grammar, adapter=adapter, priority=priority
        )
        fields = batch.for_conversations(messages, tools, chat_template_kwargs)
        options = OutputOptions.from_arguments(n, best_of, logprobs, prompt_logprobs)
        return self._text.generate(fields, sampling_params, options, use_tqdm)

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
        images: Image | Sequence[Image] | None = None,
    ) -> TextStream:
        """Return the text of one prompt or conversation as a stream of pieces.

        Other calls raise `UnsupportedFeatureError` from the first piece until the last piece, or until the
        stream's ``close()``. See `generate` and `chat` for the parameters. The stream's ``output`` contains
        the log probabilities.

        Raises:
            InputError: the prompt cannot be served, or not exactly one of prompt and messages is given.
            TaskMismatchError: the model does not generate text.
        """
        self._check_task("LLM.stream", PipelineTask.TEXT_GENERATION)
        if (prompt is None) == (messages is None):
            raise InputError("give either a prompt or messages")
        (prompt_images,) = images_per_prompt(images, 1, is_one_prompt=True)
        options = OutputOptions.from_arguments(1, None, logprobs, prompt_logprobs)
        request = self._text.request(
            0,
            params_for_each(self.config, sampling_params, 1)[0],
            options,
            prompt=prompt,
            messages=messages,
            images=prompt_images,
            tools=tools,
            chat_template_options=chat_template_kwargs,
            grammar=grammar,
            response_format=response_format,
            adapter=adapter,
        )
        (builder,) = self._text.builders(request, options)
        return TextStream(builder, self._text.stream(builder), options)

    @suggest_parameters
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
        """Search for the most probable completions with beam search, like transformers' ``generate``.

        Args:
            prompts: see `generate`.
            num_beams: number of beams per prompt.
            num_return_sequences: number of outputs per prompt, at most ``num_beams``.
            max_new_tokens: maximum number of tokens of a completion; None uses the model's maximum length.
            length_penalty: values above 0 favour long completions, values below 0 short completions.
            early_stopping: when the search ends (`BeamOptions.early_stopping`).
            ignore_eos: whether all completions continue to the maximum length.
            adapter: the LoRA adapter.
            use_tqdm: see `generate`.

        Returns:
            ``num_return_sequences`` outputs for each prompt, best first, in the order of the prompts. Each
            output has its ``score`` and the log probabilities of its tokens.

        Raises:
            InputError: a prompt cannot be served.
            InsufficientBlocksError: the beams of one prompt do not fit the KV cache.
            TaskMismatchError: the model does not generate text.
            UnsupportedFeatureError: the configuration enables speculative decoding.
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
            self._text.request(index, params, OutputOptions(), prompt=prompt, adapter=adapter)
            for index, prompt in enumerate(batch)
        ]
        contexts = [self._text.context(request, len(batch)) for request in requests]
        plan = self.pipeline.memory_plan
        limits = (plan.max_batch_size, plan.max_batch_input_tokens)
        outputs: list[GenerationOutput] = []
        with self._runner.exclusive(), GenerationProgress(len(contexts), shown=use_tqdm) as progress:
            for context, beams in search(self.pipeline, contexts, options, *limits):
                for index, beam in enumerate(beams):
                    outputs.append(GenerationOutput.from_beam(context, index, beam, self.tokenizer))
                progress.advance(num_tokens=sum(len(beam.token_ids) for beam in beams), num_prompts=1)
        return outputs

    def close(self) -> None:
        """Free the model's memory. Later calls of other methods raise `InputError`.

        Raises:
            UnsupportedFeatureError: a stream is open, or another thread runs a call.
        """
        if not self._is_open:
            return
        with self._runner.exclusive():
            self.pipeline.close()
            self._runner.close()
            close_tokenizer(self.tokenizer)
            del self.pipeline, self._scheduler

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # close() fails while a stream is open, and its error would hide the original error.
        if self._is_open and not (error is not None and self._runner.is_busy):
            self.close()

    def _check_task(self, method: str, task: PipelineTask) -> None:
        """Check that a method belongs to the task of the model.

        Raises:
            InputError: the LLM is closed.
            ForkedProcessError: this process was forked after the model was loaded.
            TaskMismatchError: the method belongs to another task.
        """
        if not self._is_open:
            raise InputError("this LLM is closed: make a new one")
        self.pipeline.session.check_process()
        model_task = self.config.model.pipeline_task
        if model_task is not task:
            raise TaskMismatchError(method, task.option, model_task.option)

    @property
    def _is_open(self) -> bool:
        return "pipeline" in vars(self)
