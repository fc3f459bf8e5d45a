"""`Summary`: throughput, latency percentiles and errors of a load test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.bench.load import Measurement

PERCENTILES = (50, 90, 95, 99)


class Distribution(msgspec.Struct, frozen=True):
    """Statistics of durations, in seconds."""

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: dict[str, float]
    """``p50``, ``p90``, ``p95``, ``p99``."""

    @classmethod
    def from_samples(cls, seconds: Sequence[float]) -> Distribution | None:
        """Return the statistics of durations; None for an empty sequence."""
        if not seconds:
            return None
        values = np.asarray(seconds)
        percentiles = np.percentile(values, PERCENTILES)
        return cls(
            len(values),
            float(values.mean()),
            float(values.min()),
            float(values.max()),
            {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, percentiles, strict=True)},
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a load test. Latencies, in seconds, include only successful requests."""

    requests: int
    completed: int
    errors: dict[str, int]
    """Kind of error -> number of requests."""
    error_details: dict[str, str]
    """Kind of error -> the message of the first error of this kind."""
    is_interrupted: bool
    seconds: float
    requests_per_second: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prompt_tokens_per_second: float
    completion_tokens_per_second: float
    time_to_first_token: Distribution | None
    """Time from the due time of a request to its first text; None if no text was streamed."""
    inter_token: Distribution | None
    """Time between consecutive events with text. An event can contain several tokens."""
    time_per_token: Distribution | None
    """For each request, the mean time per token after the first token."""
    end_to_end: Distribution | None
    round_trip: Distribution | None = None
    """Round-trip times of the small requests that were sent before the load test."""

    @classmethod
    def from_measurement(cls, measurement: Measurement) -> Summary:
        """Return the summary of a measurement."""
        successful_outcomes = [outcome for outcome in measurement.outcomes if outcome.error is None]
        failed = [outcome for outcome in measurement.outcomes if outcome.error is not None]
        seconds = max(measurement.seconds, 1e-9)
        prompt_tokens, completion_tokens = (
            sum(outcome.prompt_tokens for outcome in successful_outcomes),
            sum(outcome.completion_tokens for outcome in successful_outcomes),
        )
        first_token_times = [
            outcome.first_token_seconds
            for outcome in successful_outcomes
            if outcome.first_token_seconds is not None
        ]
        token_times = [
            outcome.token_seconds for outcome in successful_outcomes if outcome.token_seconds is not None
        ]
        return cls(
            requests=len(measurement.outcomes),
            completed=len(successful_outcomes),
            errors=dict(Counter(str(outcome.error) for outcome in failed).most_common()),
            error_details={str(outcome.error): outcome.detail for outcome in reversed(failed)},
            is_interrupted=measurement.is_interrupted,
            seconds=seconds,
            requests_per_second=len(successful_outcomes) / seconds,
            prompt_tokens=prompt_tokens,
            cached_tokens=sum(outcome.cached_tokens for outcome in successful_outcomes),
            completion_tokens=completion_tokens,
            prompt_tokens_per_second=prompt_tokens / seconds,
            completion_tokens_per_second=completion_tokens / seconds,
            time_to_first_token=Distribution.from_samples(first_token_times),
            inter_token=Distribution.from_samples(
                [gap for outcome in successful_outcomes for gap in outcome.gaps]
            ),
            time_per_token=Distribution.from_samples(token_times),
            end_to_end=Distribution.from_samples([outcome.seconds for outcome in successful_outcomes]),
            round_trip=Distribution.from_samples(measurement.round_trips),
        )

    def latencies(self) -> dict[str, Distribution]:
        """Return the distributions that are not None, by their row names in the printed table."""
        distributions = {
            "time to first token": self.time_to_first_token,
            "inter-token": self.inter_token,
            "time per token": self.time_per_token,
            "end to end": self.end_to_end,
            "keep-alive": self.round_trip,
        }
        return {
            name: distribution for name, distribution in distributions.items() if distribution is not None
        }


def build_report(measurement: Measurement, settings: dict[str, object]) -> dict[str, object]:
    """Return a measurement as data for JSON: the settings, the summary, and each request."""
    start = measurement.start_time
    return {
        "settings": settings,
        "summary": msgspec.to_builtins(Summary.from_measurement(measurement)),
        "requests": [
            {
                "index": outcome.index,
                "scheduled": outcome.scheduled_time - start,
                "sent": outcome.sent_time - start if outcome.sent_time else None,
                "time_to_first_token": outcome.first_token_seconds,
                "end_to_end": outcome.seconds,
                "prompt_tokens": outcome.prompt_tokens,
                "cached_tokens": outcome.cached_tokens,
                "completion_tokens": outcome.completion_tokens,
                "events": len(outcome.text_times),
                "error": outcome.error,
                "detail": outcome.detail or None,
            }
            for outcome in measurement.outcomes
        ],
    }
