"""What many requests come to: throughput, percentiles of latencies, errors by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.bench.load import Measurement

PERCENTILES = (50, 90, 95, 99)


class Distribution(msgspec.Struct, frozen=True):
    """Seconds, in some numbers."""

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: dict[str, float]
    """``p50``, ``p90``, ``p95``, ``p99``."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution | None:
        """That of some values; None where there are none."""
        if not seconds:
            return None
        values = np.asarray(seconds)
        found = np.percentile(values, PERCENTILES)
        return cls(
            len(values),
            float(values.mean()),
            float(values.min()),
            float(values.max()),
            {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, found, strict=True)},
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement in numbers. Latencies are those of requests that succeeded, in seconds."""

    requests: int
    completed: int
    errors: dict[str, int]
    """Kind -> requests; together with ``completed`` all of them."""
    error_details: dict[str, str]
    """Kind -> what was said the first time."""
    is_interrupted: bool
    seconds: float
    requests_per_second: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prompt_tokens_per_second: float
    completion_tokens_per_second: float
    time_to_first_token: Distribution | None
    """From the moment when the request was due to its first text; None where nothing streamed."""
    inter_token: Distribution | None
    """Between two events that have text. A server may put several tokens into one."""
    time_per_token: Distribution | None
    """Of each request, the mean time of a token after the first."""
    end_to_end: Distribution | None
    round_trip: Distribution | None = None
    """Of small requests on one connection that is kept, before the load."""

    @classmethod
    def of(cls, measurement: Measurement) -> Summary:
        """Of all that was measured."""
        good = [one for one in measurement.outcomes if one.error is None]
        bad = [one for one in measurement.outcomes if one.error is not None]
        seconds = max(measurement.seconds, 1e-9)
        prompt, completion = (
            sum(one.prompt_tokens for one in good),
            sum(one.completion_tokens for one in good),
        )
        firsts = [one.first_token_seconds for one in good if one.first_token_seconds is not None]
        each = [one.token_seconds for one in good if one.token_seconds is not None]
        return cls(
            requests=len(measurement.outcomes),
            completed=len(good),
            errors=dict(Counter(str(one.error) for one in bad).most_common()),
            error_details={str(one.error): one.detail for one in reversed(bad)},
            is_interrupted=measurement.is_interrupted,
            seconds=seconds,
            requests_per_second=len(good) / seconds,
            prompt_tokens=prompt,
            cached_tokens=sum(one.cached_tokens for one in good),
            completion_tokens=completion,
            prompt_tokens_per_second=prompt / seconds,
            completion_tokens_per_second=completion / seconds,
            time_to_first_token=Distribution.of(firsts),
            inter_token=Distribution.of([gap for one in good for gap in one.gaps]),
            time_per_token=Distribution.of(each),
            end_to_end=Distribution.of([one.seconds for one in good]),
            round_trip=Distribution.of(measurement.round_trips),
        )

    def latencies(self) -> dict[str, Distribution]:
        """Name -> those that there are."""
        named = {
            "time to first token": self.time_to_first_token,
            "inter-token": self.inter_token,
            "time per token": self.time_per_token,
            "end to end": self.end_to_end,
            "keep-alive": self.round_trip,
        }
        return {name: one for name, one in named.items() if one is not None}


def report_of(measurement: Measurement, settings: dict[str, Any]) -> dict[str, Any]:
    """All of a measurement, for a JSON file: how it was made, the summary, and each request."""
    start = measurement.started
    return {
        "settings": settings,
        "summary": msgspec.to_builtins(Summary.of(measurement)),
        "requests": [
            {
                "index": one.index,
                "scheduled": one.scheduled - start,
                "sent": one.sent - start if one.sent else None,
                "time_to_first_token": one.first_token_seconds,
                "end_to_end": one.seconds,
                "prompt_tokens": one.prompt_tokens,
                "cached_tokens": one.cached_tokens,
                "completion_tokens": one.completion_tokens,
                "events": len(one.text_times),
                "error": one.error,
                "detail": one.detail or None,
            }
            for one in measurement.outcomes
        ],
    }
