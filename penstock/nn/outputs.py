"""Which rows of a forward come back."""

from __future__ import annotations

from enum import Enum


class ReturnLogits(str, Enum):
    """Which rows of logits a model computes."""

    LAST_TOKEN = "last_token"
    """One row a sequence: what comes after its last token."""
    VARIABLE = "variable"
    """The last ``return_n_logits`` rows of each sequence."""
    ALL = "all"
    """A row for every token of the batch."""


class ReturnHiddenStates(str, Enum):
    """Which rows of hidden states come back beside the logits."""

    NONE = "none"
    LAST = "last"
    """The last row of each sequence, as the last layer left it."""
    ALL = "all"
    """Every row, as the last layer left it."""
    LAST_NORMALIZED = "last_normalized"
    """The last row of each sequence, after the final norm."""
    ALL_NORMALIZED = "all_normalized"
    """Every row, after the final norm."""
