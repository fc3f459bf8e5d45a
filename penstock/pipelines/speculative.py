"""Speculation: somebody drafts tokens, the model verifies them in one forward.

The model samples each drafted position with that position's own draw and a draft is accepted when it is
the very token sampled, so that the text is, greedy or not, token for token that of plain decoding
(cf. Leviathan et al. 2023, arXiv:2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.pipelines.core import TextContext


class DraftProposer(Protocol):
    """Guesses what comes next."""

    def propose(self, contexts: Sequence[TextContext]) -> list[list[int]]:
        """Drafted tokens for each context, any number each; its own state is its own affair."""
        ...


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The tokens that verification yields: the drafts that were sampled too, and the token behind them.

    Args:
        drafts: k drafted tokens.
        sampled: k + 1 tokens: what was sampled in place of each draft, and behind the last.
    """
    matching = 0
    while matching < len(drafts) and drafts[matching] == sampled[matching]:
        matching += 1
    return list(sampled[: matching + 1])
