"""Text requests of `LLM`: converts prompts to contexts, and outputs of contexts to results."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypedDict, Unpack, cast
from uuid import uuid4

from penstock.assembly import STREAMING_LATENCY_BUDGET
from penstock.config import PipelineConfig
from penstock.errors import InputError
from penstock.host.interrupts import deferred_interrupts
from penstock.host.progress import GenerationProgress
from penstock.llm.batch_runner import BatchRunner
from penstock.llm.images import Image, image_bytes, prompts_with_images, separate_images
from penstock.llm.outputs import GenerationOutput, OutputBuilder, OutputOptions, best_first
from penstock.llm.prompts import (
    ChatMessages,
    Prompt,
    ToolDescriptions,
    as_conversations,
    broadcast,
    params_for_each,
)
from penstock.pipelines.core import (
    Grammar,
    SamplingParams,
    TextContext,
    TokenGeneratorRequest,
    TokenGeneratorRequestMessage,
    TokenGeneratorRequestTool,
    TokenGeneratorResponseFormat,
)
from penstock.pipelines.core.choices import choice_contexts
from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import TextTokenizer

BATCH_LATENCY_BUDGET = 0.1
"""Target duration of one scheduler call in seconds, for requests that are not streamed. Streams use
`STREAMING_LATENCY_BUDGET`."""


class TextFields(TypedDict, total=False):
    """Fields of a `TokenGeneratorRequest` that callers of `LLM` pass."""

    prompt: Prompt | None
    messages: object
    """Messages. The chat template checks them. Image parts may contain any `Image`."""
    images: list[Image] | None
    tools: ToolDescriptions | None
    chat_template_options: dict[str, object] | None
    response_format: Mapping[str, object] | None
    grammar: Grammar | None
    adapter: str | None
    priority: int


@dataclass(frozen=True, kw_only=True)
class BatchFields:
    """The fields of several requests. A field has one value for all requests, or a list of one value each."""

    response_format: Mapping[str, object] | None
    grammar: Grammar | Sequence[Grammar | None] | None
    adapter: str | Sequence[str | None] | None
    priority: int | Sequence[int]

    def for_prompts(
        self, prompts: Prompt | Sequence[Prompt], images: Image | Sequence[Image] | None
    ) -> list[TextFields]:
        """Return the fields of one request for each prompt.

        Raises:
            InputError: a list does not have one value for each prompt.
        """
        prompts_and_images = prompts_with_images(prompts, images)
        pairs = zip(prompts_and_images, self._fields_of_requests(len(prompts_and_images)), strict=True)
        return [
            {**fields, "prompt": prompt, "images": prompt_images} for (prompt, prompt_images), fields in pairs
        ]

    def for_conversations(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        tools: ToolDescriptions | None,
        template_options: dict[str, object] | None,
    ) -> list[TextFields]:
        """Return the fields of one request for each conversation.

        Raises:
            InputError: a list does not have one value for each conversation.
        """
        conversations = as_conversations(messages)
        pairs = zip(conversations, self._fields_of_requests(len(conversations)), strict=True)
        return [
            {**fields, "messages": conversation, "tools": tools, "chat_template_options": template_options}
            for conversation, fields in pairs
        ]

    def _fields_of_requests(self, num_requests: int) -> list[TextFields]:
        grammars: list[Grammar | None] = broadcast("grammar", self.grammar, num_requests)
        adapters: list[str | None] = broadcast("adapter", self.adapter, num_requests)
        priorities = broadcast("priority", self.priority, num_requests)
        return [
            {
                "response_format": self.response_format,
                "grammar": grammar,
                "adapter": adapter,
                "priority": priority,
            }
            for grammar, adapter, priority in zip(grammars, adapters, priorities, strict=True)
        ]


class TextRequests:
    """Builds and runs the text requests of an `LLM`.

    Args:
        config: the configuration of the model.
        tokenizer: the model's tokenizer.
        runner: runs the contexts.
    """

    def __init__(self, config: PipelineConfig, tokenizer: TextTokenizer, runner: BatchRunner) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._runner = runner

    def generate(
        self,
        fields: Sequence[TextFields],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: OutputOptions,
        use_tqdm: bool,
    ) -> list[GenerationOutput]:
        """Run one request for each entry of `fields`. Return the outputs in the order of the entries."""
        num_requests = len(fields)
        params = params_for_each(self._config, sampling_params, num_requests)
        requests = [
            self.request(index, params[index], options, **fields[index]) for index in range(num_requests)
        ]
        builders_by_request = [self.builders(request, options, num_requests) for request in requests]
        all_builders = list(chain.from_iterable(builders_by_request))
        progress = GenerationProgress(len(all_builders), shown=use_tqdm)
        # The signal handler is set once for all steps, because setting it takes a tenth of the Python time of
        # a step.
        with self._runner.exclusive(), deferred_interrupts() as deliver_interrupts, progress:
            for updated_builders in self._runner.run(all_builders, seconds=BATCH_LATENCY_BUDGET):
                deliver_interrupts()
                progress.advance(
                    num_tokens=sum(builder.num_new_tokens for builder in updated_builders),
                    num_prompts=sum(builder.is_done for builder in updated_builders),
                )
        return [output for choices in builders_by_request for output in best_first(choices, options)]

    def stream(self, builder: OutputBuilder) -> Generator[str, None, None]:
        """Run one context and yield its text in pieces."""
        with self._runner.exclusive():
            for _ in self._runner.run([builder], seconds=STREAMING_LATENCY_BUDGET):
                if builder.new_text:
                    yield builder.new_text

    def request(
        self, index: int, params: SamplingParams, options: OutputOptions, **fields: Unpack[TextFields]
    ) -> TokenGeneratorRequest:
        """Return a request with ``fields``, see `text_request`."""
        return text_request(self._config.model.name, index, params, options, **fields)

    def context(self, request: TokenGeneratorRequest, num_requests: int) -> TextContext:
        """Return the context of a request.

        Raises:
            InputError: the request cannot be served. If there are several requests, a note of the error
                contains the number of the request.
        """
        try:
            context: TextContext = self._tokenizer.build_context(request, stops_as_tokens=False)
        except InputError as error:
            if num_requests > 1:
                error.add_note(f"in prompt {request.index + 1} of {num_requests}")
            raise
        return context

    def builders(
        self, request: TokenGeneratorRequest, options: OutputOptions, num_requests: int = 1
    ) -> list[OutputBuilder]:
        """Return one builder for each choice. Only the first choice echoes the prompt."""
        return make_builders(self._tokenizer, self.context(request, num_requests), options)


def text_request(
    model_name: str,
    index: int,
    params: SamplingParams,
    options: OutputOptions,
    **fields: Unpack[TextFields],
) -> TokenGeneratorRequest:
    """Return a request with a new id and the given ``fields``.

    Images in ``messages`` become the ``images`` of the request. Image files are read.

    Raises:
        InputError: an image cannot be read, or both messages and ``images`` are given.
    """
    messages, image_list = fields.get("messages"), fields.get("images")
    images, details = None if image_list is None else list(map(image_bytes, image_list)), None
    if messages is not None:
        if image_list is not None:
            raise InputError("the images of messages are parts of their content: leave out images")
        messages, images, details = separate_images(messages)
    return TokenGeneratorRequest(
        uuid4().hex,
        index,
        model_name,
        prompt=fields.get("prompt"),
        # The tokenizer and the chat template check the types of messages, tools and format.
        messages=cast("list[TokenGeneratorRequestMessage] | None", messages),
        images=images,
        tools=cast("list[TokenGeneratorRequestTool] | None", fields.get("tools")),
        response_format=cast("TokenGeneratorResponseFormat | None", fields.get("response_format")),
        logprobs=options.num_top_tokens,
        echo=options.prompt_logprobs is not None,
        chat_template_options=fields.get("chat_template_options"),
        sampling_params=params,
        grammar=fields.get("grammar"),
        adapter=fields.get("adapter"),
        priority=fields.get("priority", 0),
        image_details=details,
    )


def make_builders(
    tokenizer: TextTokenizer, context: TextContext, options: OutputOptions
) -> list[OutputBuilder]:
    """Return one builder for each choice of a prompt. Only the first choice echoes the prompt.

    Raises:
        InputError: the sampling parameters have stop strings, but ``detokenize`` is false.
    """
    contexts = choice_contexts(context, options.num_choices)
    for further_context in contexts[1:]:
        further_context.log_probabilities_echo = False
    stop = contexts[0].sampling_params.stop
    if contexts[0].sampling_params.detokenize:
        prompt = contexts[0].prompt_tokens
        return [
            OutputBuilder(context, Detokenizer(tokenizer, stop or (), prompt=prompt)) for context in contexts
        ]
    if stop:
        raise InputError("stop strings are matched on text: they need detokenize=True")
    return [OutputBuilder(context, None) for context in contexts]
