"""What a file of this folder defines: one way of writing calls."""

from __future__ import annotations

from typing import Protocol

from penstock.serve.parsers.output_parser import ToolCallReader
from penstock.serve.parsers.structural_tags import Tag
from penstock.serve.parsers.tools import Tools


class ToolFormat(ToolCallReader, Protocol):
    """How calls are found in text, and how a grammar forces them."""

    @property
    def name(self) -> str:
        """What flags call it."""
        ...

    @property
    def id_length(self) -> int:
        """Length of a call's id where the format fixes it, else 0."""
        ...

    def suits(self, template: str) -> bool:
        """Whether a chat template writes calls like this."""
        ...

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        """One call of these tools, or with `parallel` also several, and nothing else.

        Raises:
            UnsupportedSchemaError: the schema of the arguments has a keyword that cannot be honoured.
        """
        ...

    def behind(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        """What follows a marker, and the marker that ends it: a call of these tools, or where the format has
        several between two markers and `parallel` allows it, several.

        Raises:
            UnsupportedSchemaError: as `grammar`.
        """
        ...
