"""A conversation: the validated request of any chat API, its prompt and its output format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.pipelines.core import Grammar, TextContext
from penstock.serve.api.chat_prompt import (
    ToolUse,
    check_template_shows,
    messages_of,
    template_messages,
    template_options,
    tool_use,
)
from penstock.serve.api.choice_decoder import ChoiceDecoder
from penstock.serve.api.generation import GenerationJob, check_choices
from penstock.serve.api.images import ImageFields
from penstock.serve.api.logprob_limit import check_num_logprobs, num_prompt_logprobs, with_bounded_output
from penstock.serve.api.models import adapter_named
from penstock.serve.api.output_format import check_enabled, check_tools, checked_grammar, output_grammar
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

    Responses, Messages, Ollama and the other chat APIs translate their requests to a chat request.
    """

    body: ChatBody
    use: ToolUse
    context: TextContext
    opens_reasoning: bool
    """Whether the prompt ends inside a reasoning block."""

    @classmethod
    def of(cls, services: Services, raw: Mapping[str, object], request_id: str) -> Conversation:
        """Validate a chat request, render its messages and encode them. Slow: call it in the pool.

        Args:
            services: the objects that routes use.
            raw: the decoded body of a chat request.
            request_id: the id of the context.

        Raises:
            RequestProblem: 400 that names the field.
            UnknownModelError: the server has no model or adapter of that name.
        """
        body = checked_body(services, ChatBody, raw)
        check_choices(services, 1, body.n or 1)
        chat_messages = messages_of(raw)
        use = tool_use(body, raw)
        check_template_shows(use.tools, services.tokenizer)
        parsers, tokenizer = services.parsers, services.tokenizer
        messages = template_messages(chat_messages, tokenizer)
        options = template_options(body, tokenizer, can_reason=parsers.reasoning_format is not None)
        with map_input_errors("messages"):
            check_roles(messages, tokenizer, use.tools or None, options)
        top = (body.top_logprobs or 0) if body.logprobs else None
        context = request_context(
            services,
            body,
            request_id,
            param="messages",
            adapter=adapter_named(services, body.model),
            top=top,
            echo=body.prompt_logprobs is not None,
            messages=messages,
            tools=use.tools or None,
            chat_template_options=options,
            **image_fields(services, chat_messages),
        )
        prompt_rows = num_prompt_logprobs(body, [context])
        if top is not None and output_limit(body) is None:
            context = with_bounded_output(services, context, body.n or 1, top=top, prompt_rows=prompt_rows)
        check_num_logprobs(
            services,
            [context] * (body.n or 1),
            top=top,
            prompt_rows=prompt_rows,
            param="top_logprobs" if body.logprobs else "prompt_logprobs",
        )
        opens_reasoning = parsers.prompt_opens_reasoning(str(context.prompt), _prefill(body))
        grammar = _grammar(services, body, use, opens_reasoning)
        if grammar is not None:
            context = msgspec.structs.replace(context, grammar=grammar)
        return cls(body, use, context, opens_reasoning)

    def job(self, services: Services) -> GenerationJob:
        """Return a context and a decoder for each choice."""
        parsers = services.parsers
        parallel = self.body.parallel_tool_calls is not False
        contexts = contexts_for_choices(self.context, self.body, has_logprobs=bool(self.body.logprobs))
        choices = [
            ChoiceDecoder(
                context,
                services.tokenizer,
                parser=parsers.new(
                    tools=self.use.tools,
                    tool_choice=self.use.choice,
                    in_reasoning=self.opens_reasoning,
                    parallel=parallel,
                    shows_special_tokens=self.body.shows_special_tokens,
                    unmarked_in_text=self.context.grammar is None,
                ),
                skip_special_tokens=parsers.skip_special_tokens and not self.body.shows_special_tokens,
                token_by_token=parsers.reasoning_format is not None or not parallel,
                at_once=not self.body.stream,
                keeps_stop=bool(self.body.include_stop_str_in_output),
            )
            for context in contexts
        ]
        return GenerationJob(contexts, choices, self.body.n or 1)


def image_fields(services: Services, messages: Sequence[Message]) -> ImageFields:
    """Return the request fields with the images of messages; empty without images. Blocks on files and URLs.

    Raises:
        RequestProblem: 400 that names the message of an image that cannot be read.
    """
    if not services.tokenizer.reads_images:
        return {}
    with map_input_errors("messages"):
        return services.images.fields(messages)


def _prefill(body: ChatBody) -> str:
    """Return the text of the last message if the output continues it, else ""."""
    last = body.messages[-1]
    if not body.continue_final_message or last.role != "assistant":
        return ""
    content = last.content
    text = content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
    return text


def _grammar(services: Services, body: ChatBody, use: ToolUse, opens_reasoning: bool) -> Grammar | None:
    """Return the grammar of the output after the reasoning; None for free text.

    Raises:
        RequestProblem: 400 that names the field.
    """
    parsers = services.parsers
    parallel = body.parallel_tool_calls is not False
    grammar_and_field = output_grammar(services, body)
    if use.is_forced:  # the output is a tool call, so a format of the text has no effect
        check_enabled(services, body, "tool_choice")
        check_tools(services, body, use.callable_names)
        with map_input_errors("tool_choice"):
            call_grammar = parsers.grammar(
                use.tools, use.choice, parallel=parallel, reasoning=True, in_reasoning=opens_reasoning
            )
        return checked_grammar(services, call_grammar, "tools")
    if grammar_and_field is None and not use.strict:
        return None
    grammar, param = grammar_and_field or (None, "tools")
    check_enabled(services, body, param)
    check_tools(services, body, use.strict)
    with map_input_errors(param):
        if grammar is None:
            combined_grammar = parsers.strict_grammar(
                use.tools, use.strict, parallel=parallel, in_reasoning=opens_reasoning
            )
        elif use.tools:
            combined_grammar = parsers.calls_or_format_grammar(
                grammar, use.tools, use.strict, parallel=parallel, in_reasoning=opens_reasoning
            )
        else:
            combined_grammar = parsers.after_reasoning(grammar, in_reasoning=opens_reasoning)
    return checked_grammar(services, combined_grammar, param)
