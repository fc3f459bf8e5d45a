"""The base class of all tool-call formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Reader
from penstock.serve.parsers.structural_tags import Tag, constant, repeated, sequence
from penstock.serve.parsers.tools import Tools


@dataclass(frozen=True, kw_only=True)
class ToolFormat(ABC):
    """The tool-call syntax of a model family: the reader that parses calls, and grammars that force calls."""

    name: str
    """The value of ``--tool-call-parser``."""
    models: str
    """The models that use the format, for the documentation."""
    example: str
    """One example call, for the documentation."""
    hints: tuple[str, ...]
    """Texts that every chat template of this format contains. If empty, only ``--tool-call-parser`` selects
    the format."""
    separator: str | None = None
    """Text between two calls that each have markers. None means that one pair of markers encloses all
    calls."""
    unmarked_starts: str = ""
    """Characters that can begin a call without a marker at the beginning of the output."""
    unmarked_in_text: bool = False
    """Whether calls without a marker may also follow other text."""
    id_length: int = 0
    """Length of call ids if the format fixes it, else 0."""

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """Texts that begin calls. By default, `grammar` forces the first marker."""

    @abstractmethod
    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        """Read calls after `marker`, which the parser has taken. The marker "" means a call without a marker.

        Raises:
            NotAToolCallError: the text is not a call. The text since the last call becomes content.
        """

    @abstractmethod
    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        """Return the grammar of the text after a marker, including the end marker.

        The text is one call. If one pair of markers encloses all calls, `parallel` allows several.

        Raises:
            UnsupportedSchemaError: the schema of the arguments has a keyword that the grammar cannot enforce.
        """

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        """Return the grammar of one call of these tools, or of up to 64 calls if `parallel` is True.

        Raises:
            UnsupportedSchemaError: as for `after_marker`.
        """
        begin = self.markers[0]
        call = sequence(constant(begin), self.after_marker(begin, tools, parallel))
        return call if self.separator is None else repeated(call, self.separator, parallel)

    def matches(self, template: str) -> bool:
        """Return whether a chat template contains all hints; False for a format without hints."""
        return bool(self.hints) and all(hint in template for hint in self.hints)
