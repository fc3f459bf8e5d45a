"""Speculation: somebody drafts tokens, the model verifies them in one forward.

The model samples each drafted position with that position's own draw and a draft is accepted when it is
the very token sampled, so that the text is, greedy or not, token for token that of plain decoding
(cf. Leviathan et al. 2023, arXiv:2211.17192).
"""

from penstock.pipelines.speculative.ngram import NGramProposer
from penstock.pipelines.speculative.proposer import DraftProposer, DraftWidth, FixedWidth, accept
from penstock.pipelines.speculative.stats import SpeculationStats
from penstock.pipelines.speculative.width import AdaptiveWidth

__all__ = [
    "AdaptiveWidth",
    "DraftProposer",
    "DraftWidth",
    "FixedWidth",
    "NGramProposer",
    "SpeculationStats",
    "accept",
]
