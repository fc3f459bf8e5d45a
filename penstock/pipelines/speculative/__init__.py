"""Speculation: somebody drafts tokens, the model verifies them in one forward.

The model samples each drafted position with that position's own draw and a draft is accepted when it is
the very token sampled, so that the text is, greedy or not, token for token that of plain decoding
(cf. Leviathan et al. 2023, arXiv:2211.17192).
"""

from penstock.pipelines.speculative.draft_length import AdaptiveDraftLength
from penstock.pipelines.speculative.ngram import NGramProposer
from penstock.pipelines.speculative.proposer import DraftLengthPolicy, DraftProposer, FixedDraftLength, accept
from penstock.pipelines.speculative.stats import SpeculationStats

__all__ = [
    "AdaptiveDraftLength",
    "DraftLengthPolicy",
    "DraftProposer",
    "FixedDraftLength",
    "NGramProposer",
    "SpeculationStats",
    "accept",
]
