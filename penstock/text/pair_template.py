"""`PairTemplate`: the prompt template of a generative reranker for a query and a document."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PairTemplate:
    """A prompt consists of prefix, body and suffix. Truncation removes only the end of the body."""

    prefix: str
    body: str
    """Contains ``{instruction}``, ``{query}`` and ``{document}``."""
    suffix: str
    instruction: str
    """The default instruction."""

    def render_body(self, query: str, document: str, instruction: str | None) -> str:
        """Return the body for a query and a document."""
        values = {
            "instruction": self.instruction if instruction is None else instruction,
            "query": query,
            "document": document,
        }
        return self.body.format_map(values)
