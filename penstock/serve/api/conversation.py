"""`Conversation`: a validated chat request of any API, its prompt and the grammar of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.pipelines.core import Grammar, TextContext
from penstock.serve.api.chat_prompt import (
    ToolUse,
    check_template_reads_tools,
    raw_messages,
    requested_tool_use,
    template_messages,
    template_options,
)
from penstock.serve.api.choice_decoder import ChoiceDecoder
from penstock.serve.api.generation import GenerationJob, check_choices
from penstock.serve.api.images import ImageFields
from penstock.serve.api.logprob_limit import check_num_logprobs, num_prompt_logprobs, with_bounded_output
from penstock.serve.api.models import requested_adapter
from penstock.serve.api.output_format import (
    check_grammars_enabled,
    check_tools,
    checked_grammar,
    output_grammar,
)
from penstock.serve.api.parameters import map_input_errors, output_limit
from penstock.serve.api.request_context import contexts_for_choices, request_context
from penstock.serve.api.roles import check_roles
from penstock.serve.api.schemas import ChatBody
from penstock.serve.api.text_generation import checked_body
from penstock.serve.services import Services
from penstock.text.chat_template import Message


@dataclass(frozen=True)
class Conversation:
    """A validated chat request and the context of its prompt.

    The routes of all other chat APIs, such as Responses, Messages and Ollama, translate their requests to
    chat requests.
    """

    body: ChatBody
    tool_use: ToolUse
    context: TextContext
    opens_reasoning: bool
    """Whether the prompt ends inside a reasoning block."""

    @classmethod
    def of(cls, services: Services, raw: Mapping[str, object], request_id: str) -> Conversation:
        """Validate a chat request, render its messages and encode them. Blocks: call it in a thread pool.

        Args:
            services: the objects that routes use.
            raw: the decoded body of a chat request.
            request_id: the id of the context.

        Raises:
            RequestProblem: 400; the message names the invalid field.
            UnknownModelError: the server has no model or adapter with the requested name.
        """
        body = checked_body(services, ChatBody, raw)
        check_choices(services, 1, body.n or 1)
        chat_messages = raw_messages(raw)
        tool_use = requested_tool_use(body, raw)
        check_template_reads_tools(tool_use.tools, services.tokenizer)
        parsers, tokenizer = services.parsers, services.tokenizer
        messages = template_messages(chat_messages, tokenizer)
        options = template_options(body, tokenizer, can_reason=parsers.reasoning_format_name is not None)
        with map_input_errors("messages"):
            check_roles(messages, tokenizer, tool_use.tools or None, options)
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        context = request_context(
            services,
            body,
            request_id,
            param="messages",
            adapter=requested_adapter(services, body.model),
            num_top=num_top,
            has_prompt_logprobs=body.prompt_logprobs is not None,
            messages=messages,
            tools=tool_use.tools or None,
            chat_template_options=options,
            **image_fields(services, chat_messages),
        )
        prompt_logprob_count = num_prompt_logprobs(body, [context])
        if num_top is not None and output_limit(body) is None:
            context = with_bounded_output(
                services, context, body.n or 1, num_top=num_top, prompt_logprob_count=prompt_logprob_count
            )
        check_num_logprobs(
            services,
            [context] * (body.n or 1),
            num_top=num_top,
            prompt_logprob_count=prompt_logprob_count,
            param="top_logprobs" if body.logprobs else "prompt_logprobs",
        )
        opens_reasoning = parsers.prompt_opens_reasoning(str(context.prompt), _continued_text(body))
        grammar = _grammar(services, body, tool_use, opens_reasoning)
        if grammar is not None:
            context = msgspec.structs.replace(context, grammar=grammar)
        return cls(body, tool_use, context, opens_reasoning)

    def job(self, services: Services) -> GenerationJob:
        """Return the `GenerationJob` with a context and a decoder for each choice."""
        parsers = services.parsers
        parallel = self.body.parallel_tool_calls is not False
        contexts = contexts_for_choices(self.context, self.body, has_logprobs=bool(self.body.logprobs))
        choices = [
            ChoiceDecoder(
                context,
                services.tokenizer,
                parser=parsers.new(
                    tools=self.tool_use.tools,
                    tool_choice=self.tool_use.choice,
                    in_reasoning=self.opens_reasoning,
                    parallel=parallel,
                    shows_special_tokens=self.body.shows_special_tokens,
                    unmarked_in_text=self.context.grammar is None,
                ),
                skip_special_tokens=parsers.skip_special_tokens and not self.body.shows_special_tokens,
                parses_each_token=parsers.reasoning_format_name is not None or not parallel,
                may_decode_at_end=not self.body.stream,
                keeps_stop=bool(self.body.include_stop_str_in_output),
            )
            for context in contexts
        ]
        return GenerationJob(contexts, choices, self.body.n or 1)


def image_fields(services: Services, messages: Sequence[Message]) -> ImageFields:
    """Return the request fields for the images of messages. Blocks while it reads files and URLs.

    Empty if there are no images or the model does not read images.

    Raises:
        RequestProblem: 400; there are too many images, or an image cannot be read.
    """
    if not services.tokenizer.reads_images:
        return {}
    with map_input_errors("messages"):
        return services.images.fields(messages)


def _continued_text(body: ChatBody) -> str:
    """Return the text of the last message if it is the assistant's and is continued, else an empty string."""
    last = body.messages[-1]
    if not body.continue_final_message or last.role != "assistant":
        return ""
    content = last.content
    text = content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
    return text


def _grammar(services: Services, body: ChatBody, tool_use: ToolUse, opens_reasoning: bool) -> Grammar | None:
    """Return the grammar of the output, including its reasoning; None if the output is not constrained.

    Raises:
        RequestProblem: 400; the message names the invalid field.
    """
    parsers = services.parsers
    parallel = body.parallel_tool_calls is not False
    grammar_and_field = output_grammar(services, body)
    if tool_use.is_forced:  # the output is a tool call, so a response format has no effect
        check_grammars_enabled(services, body, "tool_choice")
        check_tools(services, body, tool_use.callable_names)
        with map_input_errors("tool_choice"):
            call_grammar = parsers.grammar(
                tool_use.tools,
                tool_use.choice,
                parallel=parallel,
                allows_reasoning=True,
                in_reasoning=opens_reasoning,
            )
        return checked_grammar(services, call_grammar, "tools")
    if grammar_and_field is None and not tool_use.strict_names:
        return None
    grammar, param = grammar_and_field or (None, "tools")
    check_grammars_enabled(services, body, param)
    check_tools(services, body, tool_use.strict_names)
    with map_input_errors(param):
        if grammar is None:
            combined_grammar = parsers.strict_grammar(
                tool_use.tools, tool_use.strict_names, parallel=parallel, in_reasoning=opens_reasoning
            )
        elif tool_use.tools:
            combined_grammar = parsers.calls_or_format_grammar(
                grammar,
                tool_use.tools,
                tool_use.strict_names,
                parallel=parallel,
                in_reasoning=opens_reasoning,
            )
        else:
            combined_grammar = parsers.after_reasoning(grammar, in_reasoning=opens_reasoning)
    return checked_grammar(services, combined_grammar, param)
