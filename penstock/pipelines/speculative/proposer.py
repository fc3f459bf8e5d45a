"""Protocols for drafting tokens and for choosing draft lengths, and the acceptance of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.pipelines.core import TextContext


class DraftProposer(Protocol):
    """Drafts tokens for contexts. Called by one thread only. A proposer may keep state for each context."""

    def propose(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[list[int]]:
        """Return drafted tokens for each context, at most ``limits [B]``. The caller cuts longer drafts.

        Contexts with a limit of 0 are included, so that the proposer can compute prompts in the same chunks
        as the model. A second call for the same contexts returns the same result.
        """
        ...

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], num_accepted: Sequence[int]
    ) -> None:
        """Report the result of verification, after the tokens of the step were appended to the contexts.

        Args:
            contexts: the batch.
            drafts: the verified drafts of each context; may be fewer than proposed.
            num_accepted: number of accepted drafts of each context.
        """
        ...

    def release(self, context: TextContext) -> None:
        """Remove the state of a context. Does nothing for an unknown context."""
        ...

    def discard_cache(self) -> None:
        """Return the memory of a KV cache to the system. No context may have a state."""
        ...

    def prefault_next_pages(self) -> bool:
        """Allocate pages, see `KVCache.prefault_next_pages`. Return whether pages may remain."""
        ...


class DraftLengthPolicy(Protocol):
    """Decides how many tokens to draft. The decision changes the speed, never the output."""

    def lengths(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[int]:
        """Return the maximum number of drafts for each context, at most ``limits [B]``."""
        ...

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], num_accepted: Sequence[int]
    ) -> None:
        """Same as `DraftProposer.observe`."""
        ...

    def record_step(
        self, num_rows: int, longest_draft: int, forward_seconds: float, proposal_seconds: float
    ) -> None:
        """Record the duration of a step without prompts.

        Args:
            num_rows: number of rows of the forward.
            longest_draft: length of the longest draft.
            forward_seconds: duration of the forward, including sampling.
            proposal_seconds: duration of drafting.
        """
        ...

    def release(self, context: TextContext) -> None:
        """Remove the state of a context."""
        ...


class FixedDraftLength:
    """Drafts a fixed number of tokens, or fewer if the limit of a context is lower."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def lengths(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[int]:
        return [min(limit, self.num_drafts) for limit in limits]

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], num_accepted: Sequence[int]
    ) -> None:
        return

    def record_step(
        self, num_rows: int, longest_draft: int, forward_seconds: float, proposal_seconds: float
    ) -> None:
        return

    def release(self, context: TextContext) -> None:
        return


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Return the tokens that verification yields: the accepted drafts and the sampled token after them.

    Args:
        drafts: the k drafted tokens.
        sampled: the k + 1 tokens that were sampled at the position of each draft and after the last draft.
    """
    num_matching = 0
    while num_matching < len(drafts) and drafts[num_matching] == sampled[num_matching]:
        num_matching += 1
    return list(sampled[: num_matching + 1])


def known_tokens(drafts: list[int], vocab_size: int) -> list[int]:
    """Return the drafts before the first id outside the model's vocabulary."""
    unknown = (index for index, token in enumerate(drafts) if not 0 <= token < vocab_size)
    return drafts[: next(unknown, len(drafts))]
