"""The parsers of a model: chosen once from its chat template or by flags, then one made a choice."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.errors import ConfigError, UnsupportedFeatureError
from penstock.pipelines.core import Grammar
from penstock.serve.parsers.answer import Answer, OutputParser, PlainParser
from penstock.serve.parsers.formats import TOOL_FORMATS, ToolFormat
from penstock.serve.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from penstock.serve.parsers.structural_tags import (
    Tag,
    constant,
    either,
    grammar_of,
    optional,
    sequence,
    spaces,
    tag_of,
    text_until,
)
from penstock.serve.parsers.tools import ToolChoice, Tools

Format = TypeVar("Format", ToolFormat, ReasoningFormat)
_ALPHANUMERICS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class OutputParsers:
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
    ) -> OutputParsers:
        """The parsers by two flags: "auto" asks the chat template, "none" is none, else a format's name.

        Args:
            special_tokens: the texts of the tokens that decoding leaves out by default.

        Raises:
            ConfigError: there is no format of that name.
        """
        template = chat_template or ""
        return cls(
            _chosen("tool_call_parser", tool_call_parser, TOOL_FORMATS, template),
            _chosen("reasoning_parser", reasoning_parser, REASONING_FORMATS, template),
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
        new_id: Callable[[], str] | None = None,
    ) -> OutputParser:
        """The parser of one choice.

        Only calls of the request's tools are calls: without tools, with the choice "none", or for a name
        that is not among them, what looks like one is the answer's text.

        Args:
            in_reasoning: the prompt ends inside of a block of reasoning.
            parallel: several calls may come out; else the answer ends with the first.
            new_id: makes the ids of calls that bring none; random ones by default.
        """
        known = Tools.of(tools, tool_choice)
        calls = self.tools if known else None
        dropped = frozenset() if self.skip_special_tokens else self.special_tokens
        if calls is None and self.reasoning is None and not dropped:
            return PlainParser()
        return Answer(
            known,
            calls,
            self.reasoning,
            dropped=dropped,
            in_reasoning=in_reasoning and self.reasoning is not None,
            parallel=parallel,
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
        if self.tools is None:
            raise UnsupportedFeatureError(
                "tool_choice",
                "the chat template shows no known format of tool calls; "
                f"--tool-call-parser names one of {', '.join(TOOL_FORMATS)}",
            )
        # One named function is called once, as OpenAI has it.
        parallel = parallel and tool_choice == "required"
        tag = self.tools.grammar(Tools.of(tools, tool_choice), parallel)
        return grammar_of(self._after_reasoning(tag, in_reasoning) if reasoning else tag)

    def after_reasoning(self, grammar: Grammar, *, in_reasoning: bool | None = None) -> Grammar:
        """The grammar for what follows the reasoning; the same one where the model has no format for it.

        Args:
            in_reasoning: whether the prompt ends inside of a block of reasoning; None if nobody knows.
        """
        if self.reasoning is None:
            return grammar
        return grammar_of(self._after_reasoning(tag_of(grammar), in_reasoning))

    def _after_reasoning(self, tag: Tag, in_reasoning: bool | None) -> Tag:
        if self.reasoning is None:
            return tag
        rest = either([text_until(end) for end in self.reasoning.ends])
        whole = sequence(either([constant(begin) for begin in self.reasoning.begins]), rest)
        if in_reasoning is None:
            return sequence(optional(either([whole, rest])), spaces(), tag)
        return sequence(rest if in_reasoning else optional(whole), spaces(), tag)

    def _new_id(self) -> str:
        length = self.tools.id_length if self.tools else 0
        prefix, length = ("", length) if length else ("call_", 24)
        return prefix + "".join(secrets.choice(_ALPHANUMERICS) for _ in range(length))


def _chosen(field: str, name: str, formats: Mapping[str, Format], template: str) -> Format | None:
    if name == "none":
        return None
    if name == "auto":
        return next((row for row in formats.values() if row.suits(template)), None)
    if name not in formats:
        raise ConfigError(field, f"{name!r} is not known: auto, none, or one of {', '.join(formats)}")
    return formats[name]
