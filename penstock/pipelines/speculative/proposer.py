"""What drafts tokens, what says how many, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.pipelines.core import TextContext


class DraftProposer(Protocol):
    """Guesses what comes next. Called by one thread; what it keeps of a context is its own affair."""

    def propose(self, contexts: Sequence[TextContext], rooms: Sequence[int]) -> list[list[int]]:
        """Drafted tokens for each context, at most ``rooms [B]`` each; what is beyond is cut off.

        A context whose room is 0 gets none, but is shown all the same: its prompt may be computed in chunks,
        and the proposer may want to keep up. Proposing twice in a row for the same contexts is harmless.
        """
        ...

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], accepted: Sequence[int]
    ) -> None:
        """Tells what became of the drafts, after the contexts have taken the tokens of the step.

        Args:
            contexts: the batch.
            drafts: for each context the drafts that were verified, which may be fewer than were proposed.
            accepted: how many of these were sampled, too.
        """
        ...

    def release(self, context: TextContext) -> None:
        """Forgets a context that has left; a no-op for one never seen."""
        ...


class DraftLengthPolicy(Protocol):
    """Decides how many tokens are drafted. What it decides never changes a text, only its speed."""

    def widths(self, contexts: Sequence[TextContext], rooms: Sequence[int]) -> list[int]:
        """The most drafts for each context, at most ``rooms [B]``."""
        ...

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], accepted: Sequence[int]
    ) -> None:
        """As `DraftProposer.observe`."""
        ...

    def timed(self, num_contexts: int, num_rows: int, depth: int, forward: float, proposal: float) -> None:
        """Tells what a step without prompts took.

        Args:
            num_contexts: contexts of the step.
            num_rows: rows of its forward.
            depth: the longest draft.
            forward: seconds of the forward, sampling included.
            proposal: seconds that drafting took.
        """
        ...

    def release(self, context: TextContext) -> None:
        """Forgets a context that has left."""
        ...


class FixedDraftLength:
    """Always as many drafts as there may be at most."""

    def __init__(self, most: int) -> None:
        self.most = most

    def widths(self, contexts: Sequence[TextContext], rooms: Sequence[int]) -> list[int]:
        return [min(room, self.most) for room in rooms]

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], accepted: Sequence[int]
    ) -> None:
        return

    def timed(self, num_contexts: int, num_rows: int, depth: int, forward: float, proposal: float) -> None:
        return

    def release(self, context: TextContext) -> None:
        return


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
