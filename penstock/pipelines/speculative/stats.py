"""Counters of speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class SpeculationStats:
    """Counters since the start. Acceptance is counted per drafted token and per verified step."""

    num_proposed: int = 0
    """Number of draft tokens that the model verified, accepted or not."""
    num_accepted: int = 0
    """Number of accepted draft tokens."""
    num_verified_steps: int = 0
    """Number of pairs of step and context in which at least one draft token was verified."""
    num_forced: int = 0
    """Number of generated tokens that a grammar forced. They are not counted as draft tokens."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens divided by verified draft tokens; 0 without drafts."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens per verified step. Decoding without drafts yields 1."""
        return 1 + self.num_accepted / self.num_verified_steps if self.num_verified_steps else 1.0

    def count(self, drafts: Sequence[Sequence[int]], num_accepted: Sequence[int]) -> None:
        """Add the drafts of a step and the numbers of accepted draft tokens, one entry per context."""
        self.num_proposed += sum(map(len, drafts))
        self.num_accepted += sum(num_accepted)
        self.num_verified_steps += sum(map(bool, drafts))

    def summary(self) -> dict[str, int | float]:
        """Return all counters by name, rounded for display."""
        return {
            "proposed_tokens": self.num_proposed,
            "accepted_tokens": self.num_accepted,
            "verified_steps": self.num_verified_steps,
            "acceptance_rate": round(self.acceptance_rate, 4),
            "mean_tokens_per_verified_step": round(self.mean_tokens, 3),
            "forced_tokens": self.num_forced,
        }
