"""The parsers of a model: chosen once from its chat template or by flags, then one made a choice."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.errors import ConfigError, UnsupportedFeatureError
from penstock.pipelines.core import Grammar
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
    triggered,
    with_tokens,
)
from penstock.serve.parsers.tools import ToolChoice, Tools

Format = TypeVar("Format", ToolFormat, ReasoningFormat)
_ALPHANUMERICS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ParserFactory:
    """How one model writes calls and reasoning.

    `new` makes the parser of one choice; what it yields joined is the same however its text is cut.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    special_tokens: frozenset[str] = frozenset()

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
        """Choose the formats of a model by two flags.

        A flag is the name of a format, "none", or "auto", which selects the first format that matches the
        chat template.

        Args:
            special_tokens: the texts of the tokens that decoding omits by default.
            tool_formats: the known tool-call formats by name.
            reasoning_formats: the known reasoning formats by name.

        Raises:
            ConfigError: there is no format of that name.
        """
        template = chat_template or ""
        return cls(
            _chosen("tool_call_parser", tool_call_parser, tool_formats, template),
            _chosen("reasoning_parser", reasoning_parser, reasoning_formats, template),
            frozenset(special_tokens),
        )

    @property
    def tool_format(self) -> str | None:
        return self.tools.name if self.tools else None

    @property
    def reasoning_format(self) -> str | None:
        return self.reasoning.name if self.reasoning else None

    @property
    def skip_special_tokens(self) -> bool:
        """Whether decoding may leave special tokens out: not where markup is made of them.

        Then the parser drops those that are no markup of this request.
        """
        markup = [*(self.tools.markers if self.tools else ())]
        if self.reasoning:
            markup += [*self.reasoning.begins, *self.reasoning.ends, *self.reasoning.dropped]
        return not any(token in marker for token in self.special_tokens for marker in markup)

    def prompt_opens_reasoning(self, prompt: str, prefill: str = "") -> bool:
        """Whether the model goes on inside of a block of reasoning.

        Args:
            prompt: as rendered.
            prefill: the beginning of the answer, at the prompt's end, where the request gives one.
        """
        if self.reasoning is None:
            return False
        begun = max(prefill.rfind(marker) for marker in self.reasoning.begins)
        ended = max(prefill.rfind(marker) for marker in self.reasoning.ends)
        return begun > ended or (not prefill and self.reasoning.opened_by(prompt))

    def new(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        in_reasoning: bool = False,
        parallel: bool = True,
        shows_special_tokens: bool = False,
        bare_in_text: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> OutputParser:
        """The parser of one choice.

        Only calls of the request's tools are calls: without tools, with the choice "none", or for a name
        that is not among them, what looks like one is the answer's text.

        Args:
            in_reasoning: the prompt ends inside of a block of reasoning.
            parallel: several calls may come out; else the answer ends with the first.
            shows_special_tokens: special tokens that are no markup stay in the text.
            bare_in_text: calls without a marker are read behind other text, too, where the format has them
                there. Give False where a grammar holds calls to their schemas: it holds those at the
                beginning only.
            new_id: makes the ids of calls that bring none; random ones by default.
        """
        known = Tools.of(tools, tool_choice)
        calls = self.tools if known else None
        dropped = self.special_tokens
        if self.skip_special_tokens or shows_special_tokens:
            dropped = frozenset()
        if calls is None and self.reasoning is None and not dropped:
            return PlainParser()
        return ReasoningToolParser(
            known,
            calls,
            self.reasoning,
            dropped=dropped,
            in_reasoning=in_reasoning and self.reasoning is not None,
            parallel=parallel,
            bare_in_text=bare_in_text,
            new_id=new_id or self._new_id,
        )

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        tool_choice: ToolChoice,
        *,
        parallel: bool = True,
        reasoning: bool = False,
        in_reasoning: bool | None = None,
    ) -> Grammar | None:
        """What forces calls of the tools by the choice "required" or by name; None for other choices.

        Args:
            reasoning: the model may reason before, if it has a format for that.
            in_reasoning: whether the prompt ends inside of a block of reasoning; None if nobody knows.

        Raises:
            UnsupportedFeatureError: there is no format of calls to force.
        """
        if tool_choice in (None, "auto", "none"):
            return None
        # One named function is called once, as OpenAI has it.
        parallel = parallel and tool_choice == "required"
        tag = self._called("tool_choice", Tools.of(tools, tool_choice), parallel)
        return grammar_of(self._after_reasoning(tag, in_reasoning) if reasoning else tag)

    def strict_grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        strict: Container[str],
        *,
        parallel: bool = True,
        in_reasoning: bool | None = None,
    ) -> Grammar:
        """For the choice "auto": any text, in which calls are of the tools, of strict ones by their schemas.

        Where calls need no marker, the text begins with none of the characters that a call does.

        Args:
            strict: names of the strict tools; the arguments of others are any.
            in_reasoning: whether the prompt ends inside of a block of reasoning; None if nobody knows.

        Raises:
            UnsupportedFeatureError: there is no format of calls, or one of which this cannot be said.
            UnsupportedSchemaError: a schema has a keyword that cannot be honoured.
        """
        offered = Tools.of(tools, "auto").with_strict(strict)
        called = self._called("strict tools", offered, parallel)
        assert self.tools is not None
        if self.reasoning is not None and self.reasoning.answer:
            return grammar_of(self._turn(self.reasoning, called, in_reasoning))
        behind = {marker: self.tools.after_marker(marker, offered, parallel) for marker in self.tools.markers}
        text = self._markup(triggered(behind, parallel))
        if not self.tools.bare_starts:
            return grammar_of(text)
        marked = [self._markup(sequence(constant(marker), tag)) for marker, tag in behind.items()]
        firsts = "".join(sorted({*self.tools.bare_starts, *(marker[0] for marker in behind)}))
        first = pattern(f"[^\\s{re.escape(firsts)}]")
        tag = either([called, *marked, constant(""), sequence(first, text)])
        return grammar_of(self._after_reasoning(tag, in_reasoning, without=self.tools.markers))

    def call_or(
        self,
        grammar: Grammar,
        tools: Sequence[Mapping[str, Any]],
        strict: Container[str],
        *,
        parallel: bool = True,
        in_reasoning: bool | None = None,
    ) -> Grammar:
        """For the choice "auto" beside a format of the text: calls alone, or text by the grammar alone.

        Args and errors are those of `strict_grammar`.
        """
        called = self._called(
            "a format of the text beside tools", Tools.of(tools, "auto").with_strict(strict), parallel
        )
        return grammar_of(self._after_reasoning(either([called, self._answer(grammar)]), in_reasoning))

    def after_reasoning(self, grammar: Grammar, *, in_reasoning: bool | None = None) -> Grammar:
        """The grammar for what follows the reasoning; the same one where the model has no format for it.

        Args:
            in_reasoning: whether the prompt ends inside of a block of reasoning; None if nobody knows.
        """
        if self.reasoning is None:
            return grammar
        return grammar_of(self._after_reasoning(self._answer(grammar), in_reasoning))

    def _called(self, what: str, tools: Tools, parallel: bool) -> Tag:
        """Calls and nothing else."""
        if self.tools is None:
            raise UnsupportedFeatureError(
                what,
                "the chat template shows no known format of tool calls; "
                f"--tool-call-parser names one of {', '.join(TOOL_FORMATS)}",
            )
        return self._markup(self.tools.grammar(tools, parallel))

    def _answer(self, grammar: Grammar) -> Tag:
        """The answer's text by a grammar, with the markup that it stands in."""
        marker = self.reasoning.answer if self.reasoning else ""
        return sequence(self._markup(constant(marker)), tag_of(grammar))

    def _after_reasoning(self, tag: Tag, in_reasoning: bool | None, without: Sequence[str] = ()) -> Tag:
        if self.reasoning is None:
            return tag
        whole, rest = self._thoughts(self.reasoning, without)
        between = constant("") if self.reasoning.between else spaces()
        if in_reasoning is None:
            return sequence(optional(either([whole, rest])), between, tag)
        return sequence(rest if in_reasoning else optional(whole), between, tag)

    def _thoughts(self, reasoning: ReasoningFormat, without: Sequence[str] = ()) -> tuple[Tag, Tag]:
        """A block of reasoning, and one whose beginning is in the prompt; both up to what follows."""
        rest = sequence(
            either([text_until(end, without) for end in reasoning.ends]), constant(reasoning.between)
        )
        whole = sequence(either([constant(begin) for begin in reasoning.begins]), rest)
        return self._markup(whole), self._markup(rest)

    def _turn(self, reasoning: ReasoningFormat, called: Tag, in_reasoning: bool | None) -> Tag:
        """A whole answer where each of its parts has a marker: reasoning and remarks, then text or a call."""
        whole, rest = self._thoughts(reasoning)
        remark = self._markup(
            sequence(constant(reasoning.remark), text_until(reasoning.ends[0]), constant(reasoning.between))
        )
        text = sequence(self._markup(constant(reasoning.answer)), rest_of_text())
        turn = sequence(any_number(either([whole, remark])), either([text, called]))
        return sequence(rest, turn) if in_reasoning else turn

    def _markup(self, tag: Tag) -> Tag:
        return with_tokens(tag, self.special_tokens)

    def _new_id(self) -> str:
        length = self.tools.id_length if self.tools else 0
        prefix, length = ("", length) if length else ("call_", 24)
        return prefix + "".join(secrets.choice(_ALPHANUMERICS) for _ in range(length))


def _chosen(field: str, name: str, formats: Mapping[str, Format], template: str) -> Format | None:
    if name == "none":
        return None
    if name == "auto":
        return next((row for row in formats.values() if row.matches(template)), None)
    if name not in formats:
        raise ConfigError(field, f"{name!r} is not known: auto, none, or one of {', '.join(formats)}")
    return formats[name]
