"""Arrivals of requests like those of a recorded trace: bursts, conversations, shared system prompts.

- Conversations begin in bursts: the gaps between them have a Gamma distribution with a coefficient of
  variation of 2. BurstGPT (arXiv 2401.17644) reports Gamma gaps for the traffic of a chat service.
- The system prompt of a conversation is one of ``num_prefixes``, the k-th with a probability in proportion
  to 1 / k (Zipf).
- Lengths of system prompts, messages and answers are log-normal. The medians are parameters: in the traces
  that Splitwise (arXiv 2311.18677) describes, answers of conversations have a median of 129 tokens.
- The number of turns is geometric. The prompt of a turn is the whole conversation before it and a new
  message. It arrives after the end of the previous answer and a pause with an exponential distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError

_BURSTINESS = 2.0
"""Coefficient of variation of the gaps; 1 would be a Poisson process."""
_PREFIX_SPREAD, _MESSAGE_SPREAD, _ANSWER_SPREAD = 0.4, 1.0, 0.7
"""Standard deviations of the logarithms of lengths."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TraceShape:
    """The parameters of a trace; lengths are medians, in tokens.

    Raises:
        InputError: a parameter is not positive.
    """

    rate: float
    """Requests per second, all conversations together."""
    num_requests: int
    max_length: int
    """Maximum number of tokens of prompt and answer together; a conversation ends before it."""
    num_prefixes: int = 64
    prefix_length: int = 400
    message_length: int = 40
    answer_length: int = 100
    turns: float = 3.0
    """Mean number of turns of a conversation, if the maximum length does not end it."""
    think_seconds: float = 10.0
    vocab_size: int = 32_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rate", "num_requests", "num_prefixes", "prefix_length", "message_length"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} of a trace must be above 0, was {getattr(self, name)}")
        if self.turns < 1:
            raise InputError(f"turns of a trace must be at least 1, was {self.turns}")


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation."""

    message: Tokens
    """The tokens after the previous answer; for the first turn with the system prompt."""
    num_new_tokens: int
    think_seconds: float
    """Seconds between the end of the previous answer and the arrival."""


@dataclass(frozen=True, slots=True)
class SimulatedConversation:
    """The requests of one user."""

    name: str
    begin: float
    """Seconds after the start of the trace."""
    turns: tuple[Turn, ...]


def make_trace(shape: TraceShape) -> list[SimulatedConversation]:
    """Return conversations in the order in which they begin, with ``num_requests`` turns in total.

    The same parameters give the same trace.
    """
    conversations: list[SimulatedConversation] = []
    left, draws = shape.num_requests, np.random.default_rng(shape.seed)
    for turns in _conversations(shape, draws):
        taken = tuple(islice(turns, left))
        conversations.append(SimulatedConversation(f"user-{len(conversations)}", 0.0, taken))
        left -= len(taken)
        if left <= 0:
            break
    mean_gap = shape.num_requests / len(conversations) / shape.rate
    shape_of_gaps = 1 / _BURSTINESS**2
    gaps = draws.gamma(shape_of_gaps, mean_gap / shape_of_gaps, len(conversations))
    begins = np.cumsum(gaps) - gaps[0]
    return [
        SimulatedConversation(conversation.name, float(begin), conversation.turns)
        for conversation, begin in zip(conversations, begins, strict=True)
    ]


def _conversations(shape: TraceShape, draws: np.random.Generator) -> Iterator[list[Turn]]:
    """Yield the turns of conversations, at least one each, without end."""
    limit = shape.max_length // 2  # the first turn must fit
    lengths = [
        _length(draws, shape.prefix_length, _PREFIX_SPREAD, limit // 2) for _ in range(shape.num_prefixes)
    ]
    prefixes = [draws.integers(0, shape.vocab_size, length) for length in lengths]
    weights = 1 / np.arange(1, shape.num_prefixes + 1)
    weights /= weights.sum()
    while True:
        prefix = prefixes[draws.choice(shape.num_prefixes, p=weights)]
        turns: list[Turn] = []
        total = 0
        for number in range(draws.geometric(1 / shape.turns)):
            length = _length(draws, shape.message_length, _MESSAGE_SPREAD, limit // 2)
            message = draws.integers(0, shape.vocab_size, length)
            if not number:
                message = np.concatenate([prefix, message])
            num_new = _length(draws, shape.answer_length, _ANSWER_SPREAD, limit)
            total += len(message) + num_new
            if total > shape.max_length:
                break
            turns.append(Turn(message, num_new, float(draws.exponential(shape.think_seconds))))
        yield turns


def _length(draws: np.random.Generator, median: float, spread: float, maximum: int) -> int:
    """Draw a length from a log-normal distribution, from 1 to ``maximum``."""
    return max(1, min(round(median * float(np.exp(spread * draws.standard_normal()))), maximum))
