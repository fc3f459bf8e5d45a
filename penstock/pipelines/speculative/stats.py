"""What speculation was good for, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class SpeculationStats:
    """Counters since the beginning. Acceptance in two ways: per drafted token and per verified step."""

    num_proposed: int = 0
    """Drafted tokens that were verified."""
    num_accepted: int = 0
    """Of these, the ones that were sampled too."""
    num_verified_steps: int = 0
    """Forwards of one context that verified at least one draft of it."""
    num_forced: int = 0
    """Tokens that a grammar forced, computed together with their neighbours; no draft among them."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts of those verified, 0 to 1; 0 where there were none."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    @property
    def mean_tokens(self) -> float:
        """Tokens gained by a verified step, the one that plain decoding gives among them: 1 is no gain."""
        return 1 + self.num_accepted / self.num_verified_steps if self.num_verified_steps else 1.0

    def count(self, drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        """Adds a step."""
        self.num_proposed += sum(map(len, drafts))
        self.num_accepted += sum(accepted)
        self.num_verified_steps += sum(map(bool, drafts))

    def summary(self) -> dict[str, int | float]:
        """All of it by name, rounded for people."""
        return {
            "proposed_tokens": self.num_proposed,
            "accepted_tokens": self.num_accepted,
            "verified_steps": self.num_verified_steps,
            "acceptance_rate": round(self.acceptance_rate, 4),
            "mean_tokens_per_verified_step": round(self.mean_tokens, 3),
            "forced_tokens": self.num_forced,
        }
