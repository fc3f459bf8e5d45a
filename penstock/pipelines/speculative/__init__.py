"""Speculative decoding: a proposer drafts tokens, the model verifies them in one forward.

The model samples a token at the position of each draft, with the random number of the position. A draft is
accepted if it equals the sampled token. The output is therefore identical to decoding without drafts, greedy
or sampled (cf. Leviathan et al. 2023, arXiv:2211.17192).
"""

from penstock.pipelines.speculative.draft_length import AdaptiveDraftLength
from penstock.pipelines.speculative.ngram import NGramProposer
from penstock.pipelines.speculative.proposer import (
    DraftLengthPolicy,
    DraftProposer,
    FixedDraftLength,
    accept,
    known_tokens,
)
from penstock.pipelines.speculative.stats import SpeculationStats

__all__ = [
    "AdaptiveDraftLength",
    "DraftLengthPolicy",
    "DraftProposer",
    "FixedDraftLength",
    "NGramProposer",
    "SpeculationStats",
    "accept",
    "known_tokens",
]
