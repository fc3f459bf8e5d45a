"""Protocols for drafting tokens and for choosing draft lengths, and the acceptance of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.pipelines.core import TextContext


class DraftProposer(Protocol):
    """Drafts tokens for contexts. One thread calls it. It may keep state for each context."""

    def propose(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[list[int]]:
        """Return drafted tokens for each context, at most ``limits [B]``. The caller cuts longer drafts.

        Contexts with a limit of 0 are included, so that the proposer can compute prompts in the same chunks
        as the model. A second call for the same contexts returns the same result.
        """
        ...

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], accepted: Sequence[int]
    ) -> None:
        """Report the result of verification, after the contexts have taken the tokens of the step.

        Args:
            contexts: the batch.
            drafts: the verified drafts of each context; may be fewer than proposed.
            accepted: number of accepted drafts of each context.
        """
        ...

    def release(self, context: TextContext) -> None:
        """Remove the state of a context. Does nothing for an unknown context."""
        ...

    def discard_cache(self) -> None:
        """Return the memory of a KV cache to the system. No context may have a state."""
        ...

    def prefault_next(self) -> bool:
        """Allocate some pages of a KV cache, see `KVCache.prefault_next`. Return whether pages may remain."""
        ...


class DraftLengthPolicy(Protocol):
    """Decides how many tokens to draft. The decision changes the speed, never the output."""

    def lengths(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[int]:
        """Return the maximum number of drafts for each context, at most ``limits [B]``."""
        ...

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], accepted: Sequence[int]
    ) -> None:
        """Same as `DraftProposer.observe`."""
        ...

    def record_step(self, num_rows: int, depth: int, forward: float, proposal: float) -> None:
        """Record the duration of a step without prompts.

        Args:
            num_rows: number of rows of the forward.
            depth: length of the longest draft.
            forward: seconds of the forward, including sampling.
            proposal: seconds of drafting.
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
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], accepted: Sequence[int]
    ) -> None:
        return

    def record_step(self, num_rows: int, depth: int, forward: float, proposal: float) -> None:
        return

    def release(self, context: TextContext) -> None:
        return


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Return the tokens that verification yields: the accepted drafts and the sampled token after them.

    Args:
        drafts: the k drafted tokens.
        sampled: the k + 1 tokens that were sampled at the position of each draft and after the last draft.
    """
    matching = 0
    while matching < len(drafts) and drafts[matching] == sampled[matching]:
        matching += 1
    return list(sampled[: matching + 1])


def known_tokens(drafts: list[int], vocabulary: int) -> list[int]:
    """Return the drafts before the first id outside the model's vocabulary."""
    unknown = (index for index, token in enumerate(drafts) if not 0 <= token < vocabulary)
    return drafts[: next(unknown, len(drafts))]
