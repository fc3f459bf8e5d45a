"""How many tokens to draft: as many as pay.

A draft that is accepted saves a step; one that is not has cost a row of the forward. What a row costs is
measured while running, as is how often drafts are accepted. Widths change the speed and nothing else: the
text is that of plain decoding at any width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import numpy as np

from penstock.pipelines.core import TextContext

_OPTIMISM = 0.7
"""How often drafts are thought to be accepted before any was verified."""
_CERTAINTY = 0.98
"""No context is thought to accept more often: it may stop at any token."""
_WORTH_IT = 1.03
"""Drafts must promise to be this much faster than none, or noise would switch them on and off."""
_PROBE = 2
"""Drafts of a context that is asked whether they would be accepted by now."""
_MIN_PAUSE, _MAX_PAUSE = 16, 256
"""Steps without drafts until it is asked; twice as many each time that it answers no."""


class AdaptiveDraftLength:
    """Chooses the widths of a step that promise the most tokens a second.

    Draft j of a context is reached and accepted with probability ``p ** j``, p being how often drafts of
    this context were accepted lately; so drafts are handed out from the most probable on, over all
    contexts, for as long as tokens a second grow. Where even the first does not pay there are none, until a
    look now and then finds that it would.

    Args:
        most: the most drafts of a context.
    """

    def __init__(self, most: int) -> None:
        assert most >= 1, f"at least one draft, was {most}"
        self._most = most
        self._everyone = _Acceptance(_OPTIMISM * 4, 4.0)
        self._of_context: dict[str, _Acceptance] = {}
        self._costs = StepCosts()

    def widths(self, contexts: Sequence[TextContext], rooms: Sequence[int]) -> list[int]:
        rates = np.array([self._rate(context) for context in contexts])
        places = np.arange(1, self._most + 1)
        gains = rates[None, :] ** places[:, None]  # [most, B]: the first drafts of all, then the second ...
        gains[places[:, None] > np.array(rooms)[None, :]] = -1
        order = np.argsort(-gains, axis=None, kind="stable")[: int((gains > 0).sum())]
        number = self._best_number(len(contexts), gains.ravel()[order], places[order // len(contexts)])
        # The gains of a context fall from place to place, so that it is given its first drafts.
        widths = np.bincount(order[:number] % len(contexts), minlength=len(contexts)).tolist()
        return self._with_a_probe(contexts, rooms, widths)

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], accepted: Sequence[int]
    ) -> None:
        for context, draft, matching in zip(contexts, drafts, accepted, strict=True):
            if draft:
                tries = min(
                    matching + 1, len(draft)
                )  # those behind the first mismatch were not put to a test
                own = self._acceptance(context)
                self._everyone.add(matching, tries, memory=0.99)
                own.add(matching, tries, memory=0.95)
                own.answer(matching == len(draft))

    def timed(self, num_contexts: int, num_rows: int, depth: int, forward: float, proposal: float) -> None:
        self._costs.add(num_rows, depth, forward, proposal)

    def release(self, context: TextContext) -> None:
        self._of_context.pop(context.request_id, None)

    def _rate(self, context: TextContext) -> float:
        """How probably the next draft of a context is accepted; that of everyone where little is known."""
        own = self._acceptance(context)
        return min((own.hits + 3 * self._everyone.rate) / (own.tries + 3), _CERTAINTY)

    def _best_number(self, num_contexts: int, gains: np.ndarray, places: np.ndarray) -> int:
        """How many of the drafts on offer, the most probable ones first, give the most tokens a second.

        Args:
            num_contexts: contexts of the step: each gains a token without drafts, too.
            gains: ``[n]``, how probably each draft is accepted.
            places: ``[n]``, which draft of its context it is.
        """
        if not len(gains):
            return 0
        rows = num_contexts + np.arange(len(gains) + 1)
        depths = np.concatenate([[0], np.maximum.accumulate(places)])
        tokens = num_contexts + np.concatenate([[0], gains.cumsum()])
        speeds = tokens / self._costs.seconds(rows, depths)
        best = int(speeds.argmax())
        return best if speeds[best] > _WORTH_IT * speeds[0] else 0

    def _with_a_probe(
        self, contexts: Sequence[TextContext], rooms: Sequence[int], widths: list[int]
    ) -> list[int]:
        """Asks one of those that have paused long enough: one a step, so that no step gets much slower."""
        has_probed = False
        for index, (context, room) in enumerate(zip(contexts, rooms, strict=True)):
            own = self._acceptance(context)
            if widths[index]:
                own.idle, own.pause, own.is_probed = 0, _MIN_PAUSE, False
            elif room:
                own.idle += 1
                if own.idle > own.pause and not has_probed:
                    has_probed = own.is_probed = True
                    widths[index] = min(room, self._most, _PROBE)
        return widths

    def _acceptance(self, context: TextContext) -> _Acceptance:
        return self._of_context.setdefault(context.request_id, _Acceptance())


@dataclass(slots=True)
class _Acceptance:
    """Drafts accepted of those put to the test, older ones counting less; and how long there were none."""

    hits: float = 0.0
    tries: float = 0.0
    idle: int = 0
    pause: int = _MIN_PAUSE
    is_probed: bool = False

    @property
    def rate(self) -> float:
        return self.hits / self.tries

    def add(self, hits: int, tries: int, *, memory: float) -> None:
        self.hits = memory * self.hits + hits
        self.tries = memory * self.tries + tries

    def answer(self, is_yes: bool) -> None:
        """What a probe has shown, if this was one: after a yes the next step asks again."""
        if self.is_probed and not is_yes:
            self.idle, self.pause = 0, min(2 * self.pause, _MAX_PAUSE)
        self.is_probed = False


class StepCosts:
    """Seconds of a step as a function of its rows, learned from those that were run.

    A step of more rows takes no less time, which mends what a single slow step made us believe. Between
    numbers of rows that were seen it is a straight line. Beyond them it is a guess that errs towards trying
    them: fewer rows may cost proportionally less, more rows next to nothing.
    """

    def __init__(self) -> None:
        self._forward: dict[int, _Average] = {}  # rows -> seconds
        self._curve: tuple[list[int], list[float]] = ([], [])  # the same, ascending in both
        self._draft = _Average()

    def add(self, num_rows: int, depth: int, forward: float, proposal: float) -> None:
        """Takes note of a step: its forward of so many rows, and what the drafts took before it."""
        self._forward.setdefault(_rounded(num_rows), _Average()).add(forward)
        self._curve = self._ascending()
        if depth:
            self._draft.add(proposal / depth)

    def seconds(self, num_rows: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """What steps of so many rows, with drafts of at most so many tokens, will take; all ``[n]``."""
        return self._seconds_of_rows(num_rows) + depths * self._draft.value

    def _ascending(self) -> tuple[list[int], list[float]]:
        seen = sorted(self._forward)
        seconds = [self._forward[rows].value for rows in seen]
        for place in range(len(seen) - 2, -1, -1):
            seconds[place] = min(seconds[place], seconds[place + 1])
        return seen, seconds

    def _seconds_of_rows(self, num_rows: np.ndarray) -> np.ndarray:
        seen, seconds = self._curve
        if not seen:
            return 1.0 + _GUESS * (num_rows - 1)
        between = np.interp(num_rows, seen, seconds)
        fewer = seconds[0] * num_rows / seen[0]
        more = seconds[-1] * (1 + _GUESS * (num_rows - seen[-1]) / seen[-1])
        return np.where(num_rows < seen[0], fewer, np.where(num_rows > seen[-1], more, between))


_GUESS = 0.05
"""What doubling the rows costs, of the time without them, as long as nobody has tried."""


class _Average:
    """A moving average that a single outlier does not move far; of the first three the least.

    With fewer than three samples it claims less than it has seen: a slow step of a busy machine would
    otherwise keep everybody from ever trying that number of rows again.
    """

    def __init__(self) -> None:
        self._value = 0.0
        self._count = 0

    @property
    def value(self) -> float:
        return self._value * min(0.5 + self._count / 6, 1.0)

    def add(self, sample: float) -> None:
        self._count += 1
        if self._count == 1:
            self._value = sample
        elif self._count <= 3:
            self._value = min(self._value, sample)
        else:
            self._value += 0.2 * (min(sample, 2 * self._value) - self._value)


def _rounded(num_rows: int) -> int:
    """Up to 16 rows each number stands for itself, beyond it a few a doubling do."""
    return num_rows if num_rows <= 16 else round(2 ** (round(8 * log2(num_rows)) / 8))
