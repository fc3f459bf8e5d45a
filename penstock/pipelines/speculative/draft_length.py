"""`AdaptiveDraftLength`: chooses draft lengths that maximize tokens per second.

Each draft adds one row to the forward. An accepted draft saves a step. The cost of a row and the acceptance
rate are measured at run time. Draft lengths change the speed, never the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import numpy as np

from penstock.pipelines.core import TextContext

_INITIAL_RATE = 0.7
"""The acceptance rate that is assumed before the first draft is verified."""
_MAX_RATE = 0.98
"""Upper bound of the estimated acceptance rate. It is below 1, because a context can end at any token."""
_MIN_SPEEDUP = 1.03
"""Minimum predicted speedup for drafting, above 1 so that measurement noise does not switch drafting on."""
_PROBE_LENGTH = 2
"""Number of drafts in a probe, which tests whether drafts of a context are accepted again."""
_MIN_PAUSE, _MAX_PAUSE = 16, 256
"""Minimum and maximum number of steps without drafts before a context is probed. The number doubles after
each probe with a rejected draft, up to the maximum.
"""


class AdaptiveDraftLength:
    """Chooses the draft lengths of a step with the highest predicted tokens per second.

    The probability that draft j of a context is accepted is estimated as ``p ** j``, where p is the recent
    acceptance rate of the context. The drafts of all contexts are sorted by probability, and the number of
    most probable drafts with the highest predicted speed is chosen. If the predicted speedup is at most
    `_MIN_SPEEDUP`, only occasional probes are drafted.

    Args:
        max_drafts: the maximum number of drafts of a context.
    """

    def __init__(self, max_drafts: int) -> None:
        assert max_drafts >= 1, f"at least one draft, was {max_drafts}"
        self._max_drafts = max_drafts
        self._overall_acceptance = _Acceptance(_INITIAL_RATE * 4, 4.0)
        self._acceptances: dict[str, _Acceptance] = {}
        """The recent acceptance of each context, by request id."""
        self._costs = StepCosts()

    def lengths(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[int]:
        rates = np.array([self._acceptance_rate(context) for context in contexts])
        draft_numbers = np.arange(1, self._max_drafts + 1)
        # [max_drafts, B]: the probabilities of the first draft of each context, of the second draft, ...
        probabilities = rates[None, :] ** draft_numbers[:, None]
        probabilities[draft_numbers[:, None] > np.array(limits)[None, :]] = -1
        order = np.argsort(-probabilities, axis=None, kind="stable")[: int((probabilities > 0).sum())]
        num_drafts = self._best_num_drafts(
            len(contexts), probabilities.ravel()[order], draft_numbers[order // len(contexts)]
        )
        # The probabilities of a context decrease, so the chosen drafts of a context are its first drafts.
        lengths = np.bincount(order[:num_drafts] % len(contexts), minlength=len(contexts)).tolist()
        return self._with_probe(contexts, limits, lengths)

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], num_accepted: Sequence[int]
    ) -> None:
        for context, draft, num_matching in zip(contexts, drafts, num_accepted, strict=True):
            if draft:
                # Drafts after the first mismatch are not tested.
                num_tested = min(num_matching + 1, len(draft))
                acceptance = self._acceptance(context)
                self._overall_acceptance.add(num_matching, num_tested, decay=0.99)
                acceptance.add(num_matching, num_tested, decay=0.95)
                acceptance.record_probe(num_matching == len(draft))

    def record_step(
        self, num_rows: int, longest_draft: int, forward_seconds: float, proposal_seconds: float
    ) -> None:
        self._costs.add(num_rows, longest_draft, forward_seconds, proposal_seconds)

    def release(self, context: TextContext) -> None:
        self._acceptances.pop(context.request_id, None)

    def _acceptance_rate(self, context: TextContext) -> float:
        """Return the estimated acceptance rate of a context.

        The overall rate has the weight of 3 tested drafts. It dominates while the context has fewer.
        """
        acceptance = self._acceptance(context)
        num_accepted = acceptance.num_accepted + 3 * self._overall_acceptance.rate
        return min(num_accepted / (acceptance.num_tested + 3), _MAX_RATE)

    def _best_num_drafts(
        self, num_contexts: int, probabilities: np.ndarray, draft_numbers: np.ndarray
    ) -> int:
        """Return the number of drafts with the highest predicted tokens per second.

        Args:
            num_contexts: the number of contexts of the step, each of which yields one token without drafts.
            probabilities: ``[n]``, the acceptance probability of each draft, in descending order.
            draft_numbers: ``[n]``, the number of each draft among the drafts of its context, from 1.
        """
        if not len(probabilities):
            return 0
        num_rows = num_contexts + np.arange(len(probabilities) + 1)
        longest_drafts = np.concatenate([[0], np.maximum.accumulate(draft_numbers)])
        num_tokens = num_contexts + np.concatenate([[0], probabilities.cumsum()])
        speeds = num_tokens / self._costs.seconds(num_rows, longest_drafts)
        best = int(speeds.argmax())
        return best if speeds[best] > _MIN_SPEEDUP * speeds[0] else 0

    def _with_probe(
        self, contexts: Sequence[TextContext], limits: Sequence[int], lengths: list[int]
    ) -> list[int]:
        """Add a probe for the first context whose pause is over.

        A step has at most one probe, so that the step remains fast.
        """
        has_probe = False
        for index, (context, limit) in enumerate(zip(contexts, limits, strict=True)):
            acceptance = self._acceptance(context)
            if lengths[index]:
                acceptance.num_idle_steps, acceptance.pause_steps = 0, _MIN_PAUSE
                acceptance.is_probed = False
            elif limit:
                acceptance.num_idle_steps += 1
                if acceptance.num_idle_steps > acceptance.pause_steps and not has_probe:
                    has_probe = acceptance.is_probed = True
                    lengths[index] = min(limit, self._max_drafts, _PROBE_LENGTH)
        return lengths

    def _acceptance(self, context: TextContext) -> _Acceptance:
        return self._acceptances.setdefault(context.request_id, _Acceptance())


@dataclass(slots=True)
class _Acceptance:
    """The recent acceptance of a context: decaying counts of drafts, and the pause before the next probe."""

    num_accepted: float = 0.0
    num_tested: float = 0.0
    num_idle_steps: int = 0
    pause_steps: int = _MIN_PAUSE
    is_probed: bool = False

    @property
    def rate(self) -> float:
        return self.num_accepted / self.num_tested

    def add(self, num_accepted: int, num_tested: int, *, decay: float) -> None:
        self.num_accepted = decay * self.num_accepted + num_accepted
        self.num_tested = decay * self.num_tested + num_tested

    def record_probe(self, is_accepted: bool) -> None:
        """Record whether all drafts were accepted. Double the pause after a probe with a rejected draft."""
        if self.is_probed and not is_accepted:
            self.num_idle_steps, self.pause_steps = 0, min(2 * self.pause_steps, _MAX_PAUSE)
        self.is_probed = False


class StepCosts:
    """Estimates the duration of a step from its number of rows, based on measured steps.

    The estimate never decreases with the number of rows, which corrects single slow measurements. It is
    interpolated linearly between measured numbers of rows. Outside the measured range, the estimate is
    optimistic, so that unmeasured numbers of rows are tried. Below the range it is proportional to the number
    of rows. Above the range, twice the rows take 5 % more time (`_ASSUMED_COST_OF_DOUBLING`). Before the
    first measurement, the estimate is relative to a step of one row.
    """

    def __init__(self) -> None:
        self._forward_averages: dict[int, _Average] = {}  # number of rows -> seconds
        self._curve: tuple[list[int], list[float]] = ([], [])  # numbers of rows and seconds, both ascending
        self._draft_average = _Average()

    def add(self, num_rows: int, longest_draft: int, forward_seconds: float, proposal_seconds: float) -> None:
        """Record the durations in seconds of a forward with ``num_rows`` rows and of drafting.

        ``longest_draft`` is the length of the longest draft.
        """
        self._forward_averages.setdefault(_row_bucket(num_rows), _Average()).add(forward_seconds)
        self._curve = self._measured_costs()
        if longest_draft:
            self._draft_average.add(proposal_seconds / longest_draft)

    def seconds(self, num_rows: np.ndarray, longest_drafts: np.ndarray) -> np.ndarray:
        """Return the estimated seconds of steps ``[n]`` with the given lengths of the longest draft."""
        return self._forward_seconds(num_rows) + longest_drafts * self._draft_average.value

    def _measured_costs(self) -> tuple[list[int], list[float]]:
        measured_rows = sorted(self._forward_averages)
        seconds = [self._forward_averages[rows].value for rows in measured_rows]
        for index in range(len(measured_rows) - 2, -1, -1):
            seconds[index] = min(seconds[index], seconds[index + 1])
        return measured_rows, seconds

    def _forward_seconds(self, num_rows: np.ndarray) -> np.ndarray:
        measured_rows, seconds = self._curve
        if not measured_rows:
            return 1.0 + _ASSUMED_COST_OF_DOUBLING * (num_rows - 1)
        interpolated = np.interp(num_rows, measured_rows, seconds)
        below_range = seconds[0] * num_rows / measured_rows[0]
        above_range = seconds[-1] * (
            1 + _ASSUMED_COST_OF_DOUBLING * (num_rows - measured_rows[-1]) / measured_rows[-1]
        )
        estimates = np.where(num_rows < measured_rows[0], below_range, interpolated)
        return np.where(num_rows > measured_rows[-1], above_range, estimates)


_ASSUMED_COST_OF_DOUBLING = 0.05
"""The relative cost of doubling the number of rows that is assumed before it is measured."""


class _Average:
    """A moving average that limits the effect of outliers.

    With up to three samples, the value is derived from their minimum. With fewer than three samples, it is
    less than the minimum, so that a single slow step on a busy machine does not exclude its number of rows
    permanently.
    """

    def __init__(self) -> None:
        self._value = 0.0
        self._num_samples = 0

    @property
    def value(self) -> float:
        return self._value * min(0.5 + self._num_samples / 6, 1.0)

    def add(self, sample: float) -> None:
        self._num_samples += 1
        if self._num_samples == 1:
            self._value = sample
        elif self._num_samples <= 3:
            self._value = min(self._value, sample)
        else:
            self._value += 0.2 * (min(sample, 2 * self._value) - self._value)


def _row_bucket(num_rows: int) -> int:
    """Return the bucket of a number of rows: one per number up to 16, then eight buckets per doubling."""
    return num_rows if num_rows <= 16 else round(2 ** (round(8 * log2(num_rows)) / 8))
