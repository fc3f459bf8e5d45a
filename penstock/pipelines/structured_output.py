"""Grammars: the seam through which a context's matcher restricts what may be sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.pipelines.core import TextContext


def grammar_bitmask(
    contexts: Sequence[TextContext], sequences: np.ndarray, vocabulary: int
) -> Tensor | None:  # [R, ceil(V / 32)] int32
    """The tokens that each row's grammar allows next, a bit a token; None where no context has a grammar."""
    if all(context.matcher is None for context in contexts):
        return None
    bitmask = torch.full((len(sequences), -(-vocabulary // 32)), -1, dtype=torch.int32)
    for row, sequence in enumerate(sequences):
        matcher = contexts[sequence].matcher
        if matcher is not None:
            matcher.fill_next_token_bitmask(bitmask, row)
    return bitmask
