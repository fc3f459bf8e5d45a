"""Select the tool-call and reasoning formats of a model, and create its parsers and grammars."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import ConfigError, UnsupportedFeatureError
from penstock.pipelines.core import Grammar, TokenGeneratorRequestTool
from penstock.serve.parsers.formats import TOOL_FORMATS, ToolFormat
from penstock.serve.parsers.output_parser import OutputParser, PlainParser, ReasoningToolParser
from penstock.serve.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from penstock.serve.parsers.structural_tags import (
    Tag,
    any_number,
    constant,
    either,
    grammar_of,
    optional,
    pattern,
    rest_of_text,
    sequence,
    spaces,
    tag_of,
    text_until,
    triggered_tags,
    with_tokens,
)
from penstock.serve.parsers.tools import ToolChoice, Tools

Format = TypeVar("Format", ToolFormat, ReasoningFormat)
_ALPHANUMERICS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ParserFactory:
    """The formats in which one model writes calls and reasoning.

    `new` creates the parser of one choice. The events of the parser, merged with `merge_events`, do not
    depend on how the text is split into chunks.
    """

    tool_format: ToolFormat | None
    """The tool-call format, if any."""
    reasoning_format: ReasoningFormat | None
    """The reasoning format, if any."""
    special_tokens: frozenset[str] = frozenset()
    """The texts of the tokens that decoding omits by default."""

    @classmethod
    def choose(
        cls,
        chat_template: str | None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        special_tokens: Iterable[str] = (),
        *,
        tool_formats: Mapping[str, ToolFormat] = TOOL_FORMATS,
        reasoning_formats: Mapping[str, ReasoningFormat] = REASONING_FORMATS,
    ) -> ParserFactory:
        """Select the formats of a model by ``--tool-call-parser`` and ``--reasoning-parser``.

        Each flag is the name of a format, "none", or "auto". "auto" selects the first format that matches the
        chat template.

        Args:
            special_tokens: the texts of the tokens that decoding omits by default.
            tool_formats: the known tool-call formats by name.
            reasoning_formats: the known reasoning formats by name.

        Raises:
            ConfigError: a flag names an unknown format.
        """
        template = chat_template or ""
        return cls(
            _select_format("tool_call_parser", tool_call_parser, tool_formats, template),
            _select_format("reasoning_parser", reasoning_parser, reasoning_formats, template),
            frozenset(special_tokens),
        )

    @property
    def tool_format_name(self) -> str | None:
        """The name of the tool-call format, or None."""
        return self.tool_format.name if self.tool_format else None

    @property
    def reasoning_format_name(self) -> str | None:
        """The name of the reasoning format, or None."""
        return self.reasoning_format.name if self.reasoning_format else None

    @property
    def skip_special_tokens(self) -> bool:
        """Whether detokenization omits special tokens. False if the markup contains special tokens.

        If False, the parser drops all special tokens that are not part of the markup, unless `new` is called
        with ``shows_special_tokens``.
        """
        markup = [*(self.tool_format.markers if self.tool_format else ())]
        if self.reasoning_format:
            markup += [
                *self.reasoning_format.begin_markers,
                *self.reasoning_format.end_markers,
                *self.reasoning_format.dropped_markers,
            ]
        return not any(token in marker for token in self.special_tokens for marker in markup)

    def prompt_opens_reasoning(self, prompt: str, prefill: str = "") -> bool:
        """Return whether the output begins inside a reasoning block.

        Args:
            prompt: the rendered prompt.
            prefill: the text of the last message if the model continues this message; otherwise empty.
        """
        if self.reasoning_format is None:
            return False
        begin_position = max(prefill.rfind(marker) for marker in self.reasoning_format.begin_markers)
        end_position = max(prefill.rfind(marker) for marker in self.reasoning_format.end_markers)
        return begin_position > end_position or (not prefill and self.reasoning_format.is_opened_by(prompt))

    def new(
        self,
        *,
        tools: Sequence[TokenGeneratorRequestTool] = (),
        tool_choice: ToolChoice = "auto",
        in_reasoning: bool = False,
        parallel: bool = True,
        shows_special_tokens: bool = False,
        unmarked_in_text: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> OutputParser:
        """Create the parser of one choice.

        Only calls of the request's tools are parsed as calls. Without tools, with the choice "none", or for
        an unknown name, the text of a call is content.

        Args:
            tools: the tools of the request.
            tool_choice: the tool choice of the request.
            in_reasoning: whether the prompt ends inside a reasoning block.
            parallel: allow several calls; otherwise the output ends with the first call.
            shows_special_tokens: keep those special tokens in the text that are not part of the markup.
            unmarked_in_text: whether calls without a marker are also read after other text, if the format
                allows them. Pass False with a grammar that enforces schemas. Such a grammar checks calls
                without a marker only at the beginning of the output.
            new_id: generates ids for calls without an id; random ids by default.
        """
        callable_tools = Tools.from_request(tools, tool_choice)
        call_reader = self.tool_format if callable_tools else None
        dropped_tokens = self.special_tokens
        if self.skip_special_tokens or shows_special_tokens:
            dropped_tokens = frozenset()
        if call_reader is None and self.reasoning_format is None and not dropped_tokens:
            return PlainParser()
        return ReasoningToolParser(
            callable_tools,
            call_reader,
            self.reasoning_format,
            dropped_markers=dropped_tokens,
            in_reasoning=in_reasoning and self.reasoning_format is not None,
            parallel=parallel,
            unmarked_in_text=unmarked_in_text,
            new_id=new_id or self._new_id,
        )

    def grammar(
        self,
        tools: Sequence[TokenGeneratorRequestTool],
        tool_choice: ToolChoice,
        *,
        parallel: bool = True,
        allows_reasoning: bool = False,
        in_reasoning: bool | None = None,
    ) -> Grammar | None:
        """Return the grammar that forces calls, or None if the choice is neither "required" nor a named tool.

        Args:
            tools: the tools of the request.
            tool_choice: the tool choice of the request.
            parallel: allow several calls.
            allows_reasoning: allow reasoning before the calls if the model has a reasoning format.
            in_reasoning: whether the prompt ends inside a reasoning block; None if unknown.

        Raises:
            UnsupportedFeatureError: the model has no known tool-call format.
            UnsupportedSchemaError: a schema has a keyword that the grammar cannot enforce.
        """
        if tool_choice in (None, "auto", "none"):
            return None
        # OpenAI's API calls a named function exactly once.
        parallel = parallel and tool_choice == "required"
        tag = self._calls_tag("tool_choice", Tools.from_request(tools, tool_choice), parallel)
        return grammar_of(self._after_reasoning(tag, in_reasoning) if allows_reasoning else tag)

    def strict_grammar(
        self,
        tools: Sequence[TokenGeneratorRequestTool],
        strict_names: Container[str],
        *,
        parallel: bool = True,
        in_reasoning: bool | None = None,
    ) -> Grammar:
        """Return the grammar for the choice "auto": free text with strict calls that match their schemas.

        If the format has calls without a marker, free text must not begin with white space or with a
        character that can begin a call.

        Args:
            tools: the tools of the request.
            strict_names: names of the strict tools. Other tools accept any arguments.
            parallel: allow several calls.
            in_reasoning: whether the prompt ends inside a reasoning block; None if unknown.

        Raises:
            UnsupportedFeatureError: the model has no known tool-call format, or its format cannot be enforced
                inside free text.
            UnsupportedSchemaError: a schema has a keyword that the grammar cannot enforce.
        """
        strict_tools = Tools.from_request(tools, "auto").with_strict(strict_names)
        calls_tag = self._calls_tag("strict tools", strict_tools, parallel)
        assert self.tool_format is not None
        if self.reasoning_format is not None and self.reasoning_format.answer_marker:
            return grammar_of(self._channels_tag(self.reasoning_format, calls_tag, in_reasoning))
        tags_after_markers = {
            marker: self.tool_format.after_marker(marker, strict_tools, parallel)
            for marker in self.tool_format.markers
        }
        text = self._markup(triggered_tags(tags_after_markers, parallel))
        if not self.tool_format.unmarked_starts:
            return grammar_of(text)
        marked_calls = [
            self._markup(sequence(constant(marker), tag)) for marker, tag in tags_after_markers.items()
        ]
        starts = "".join(
            sorted({*self.tool_format.unmarked_starts, *(marker[0] for marker in tags_after_markers)})
        )
        first_character = pattern(f"[^\\s{re.escape(starts)}]")
        tag = either([calls_tag, *marked_calls, constant(""), sequence(first_character, text)])
        return grammar_of(self._after_reasoning(tag, in_reasoning, excluded=self.tool_format.markers))

    def calls_or_format_grammar(
        self,
        grammar: Grammar,
        tools: Sequence[TokenGeneratorRequestTool],
        strict_names: Container[str],
        *,
        parallel: bool = True,
        in_reasoning: bool | None = None,
    ) -> Grammar:
        """Return the grammar for the choice "auto" with an output format: calls, or text in this format.

        Args:
            grammar: the grammar of the output format.
            tools: the tools of the request.
            strict_names: names of the strict tools. Other tools accept any arguments.
            parallel: allow several calls.
            in_reasoning: whether the prompt ends inside a reasoning block; None if unknown.

        Raises:
            UnsupportedFeatureError: the model has no known tool-call format.
            UnsupportedSchemaError: a schema has a keyword that the grammar cannot enforce.
        """
        calls_tag = self._calls_tag(
            "an output format together with tools",
            Tools.from_request(tools, "auto").with_strict(strict_names),
            parallel,
        )
        return grammar_of(
            self._after_reasoning(either([calls_tag, self._content_tag(grammar)]), in_reasoning)
        )

    def after_reasoning(self, grammar: Grammar, *, in_reasoning: bool | None = None) -> Grammar:
        """Return the grammar of optional reasoning followed by `grammar`.

        If the model has no reasoning format, return `grammar`.

        Args:
            grammar: the grammar of the content.
            in_reasoning: whether the prompt ends inside a reasoning block; None if unknown.
        """
        if self.reasoning_format is None:
            return grammar
        return grammar_of(self._after_reasoning(self._content_tag(grammar), in_reasoning))

    def _calls_tag(self, feature: str, tools: Tools, parallel: bool) -> Tag:
        """Return the structural tag of one or more calls without other text."""
        if self.tool_format is None:
            raise UnsupportedFeatureError(
                feature,
                "the chat template has no known tool-call format; "
                f"set --tool-call-parser to one of {', '.join(TOOL_FORMATS)}",
            )
        return self._markup(self.tool_format.grammar(tools, parallel))

    def _content_tag(self, grammar: Grammar) -> Tag:
        """Return the structural tag of the marker before the content, and of content in this grammar."""
        marker = self.reasoning_format.answer_marker if self.reasoning_format else ""
        return sequence(self._markup(constant(marker)), tag_of(grammar))

    def _after_reasoning(self, tag: Tag, in_reasoning: bool | None, excluded: Sequence[str] = ()) -> Tag:
        if self.reasoning_format is None:
            return tag
        block, continuation = self._reasoning_tags(self.reasoning_format, excluded)
        space_tag = constant("") if self.reasoning_format.text_between else spaces()
        if in_reasoning is None:
            return sequence(optional(either([block, continuation])), space_tag, tag)
        return sequence(continuation if in_reasoning else optional(block), space_tag, tag)

    def _reasoning_tags(self, reasoning: ReasoningFormat, excluded: Sequence[str] = ()) -> tuple[Tag, Tag]:
        """Return the tags of a whole reasoning block and of a block whose begin marker is in the prompt."""
        continuation = sequence(
            either([text_until(end, excluded) for end in reasoning.end_markers]),
            constant(reasoning.text_between),
        )
        block = sequence(either([constant(begin) for begin in reasoning.begin_markers]), continuation)
        return self._markup(block), self._markup(continuation)

    def _channels_tag(self, reasoning: ReasoningFormat, calls_tag: Tag, in_reasoning: bool | None) -> Tag:
        """Return the tag of an output in which markers separate reasoning, remarks, content and calls."""
        block, continuation = self._reasoning_tags(reasoning)
        remark = self._markup(
            sequence(
                constant(reasoning.remark_marker),
                text_until(reasoning.end_markers[0]),
                constant(reasoning.text_between),
            )
        )
        text = sequence(self._markup(constant(reasoning.answer_marker)), rest_of_text())
        turn = sequence(any_number(either([block, remark])), either([text, calls_tag]))
        return sequence(continuation, turn) if in_reasoning else turn

    def _markup(self, tag: Tag) -> Tag:
        return with_tokens(tag, self.special_tokens)

    def _new_id(self) -> str:
        length = self.tool_format.id_length if self.tool_format else 0
        prefix, length = ("", length) if length else ("call_", 24)
        return prefix + "".join(secrets.choice(_ALPHANUMERICS) for _ in range(length))


def _select_format(field: str, name: str, formats: Mapping[str, Format], template: str) -> Format | None:
    if name == "none":
        return None
    if name == "auto":
        return next((row for row in formats.values() if row.matches(template)), None)
    if name not in formats:
        raise ConfigError(field, f"{name!r} is unknown: use auto, none, or one of {', '.join(formats)}")
    return formats[name]
