"""Functions that join and cut the rows of log probabilities of a context."""

from __future__ import annotations

from penstock.pipelines.core.responses import LogProbabilities


def join_rows(first: LogProbabilities | None, second: LogProbabilities) -> LogProbabilities:
    """Return the rows of ``first``, if any, followed by the rows of ``second``."""
    if first is None:
        return second
    return LogProbabilities(
        first.token_log_probabilities + second.token_log_probabilities,
        first.top_log_probabilities + second.top_log_probabilities,
    )


def without_first(rows: LogProbabilities, num_rows: int) -> LogProbabilities:
    """Return ``rows`` without the first ``num_rows`` rows."""
    return LogProbabilities(rows.token_log_probabilities[num_rows:], rows.top_log_probabilities[num_rows:])


def without_last(rows: LogProbabilities) -> LogProbabilities:
    """Return ``rows`` without the last row."""
    return LogProbabilities(rows.token_log_probabilities[:-1], rows.top_log_probabilities[:-1])
