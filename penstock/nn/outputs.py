"""Options of a forward: the rows of logits and hidden states that it returns."""

from __future__ import annotations

from enum import Enum


class ReturnLogits(str, Enum):
    """Which rows of logits a model computes."""

    LAST_TOKEN = "last_token"
    """One row for each sequence, of its last token."""
    VARIABLE = "variable"
    """The last ``return_n_logits`` rows of each sequence."""
    ALL = "all"
    """One row for each token of the batch."""


class ReturnHiddenStates(str, Enum):
    """Which rows of hidden states a model returns in addition to the logits."""

    NONE = "none"
    LAST = "last"
    """The last row of each sequence, before the final norm."""
    ALL = "all"
    """All rows, before the final norm."""
    LAST_NORMALIZED = "last_normalized"
    """The last row of each sequence, after the final norm."""
    ALL_NORMALIZED = "all_normalized"
    """All rows, after the final norm."""
