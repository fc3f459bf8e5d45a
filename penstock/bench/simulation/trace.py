"""Makes traces of requests with bursts, conversations and shared system prompts, like recorded traces.

- Conversations begin in bursts. The gaps between them have a Gamma distribution with a coefficient of
  variation of 2. BurstGPT (arXiv:2401.17644) reports Gamma gaps for the traffic of a chat service.
- The system prompt of a conversation is one of ``num_prefixes``. The probability of the k-th system prompt is
  proportional to 1 / k (Zipf).
- Lengths of system prompts, messages and answers have log-normal distributions. Their medians are parameters.
  In the traces of Splitwise (arXiv:2311.18677), answers of conversations have a median of 129 tokens.
- The number of turns has a geometric distribution. The prompt of a turn consists of the previous conversation
  and a new message. A turn arrives an exponentially distributed time after the end of the previous answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError

_BURSTINESS = 2.0
"""Coefficient of variation of the gaps between conversations; a Poisson process would have 1."""
_PREFIX_SPREAD, _MESSAGE_SPREAD, _ANSWER_SPREAD = 0.4, 1.0, 0.7
"""Standard deviations of the logarithms of lengths."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TraceParameters:
    """The parameters of a trace. Lengths are medians in tokens.

    Raises:
        InputError: ``rate``, ``num_requests``, ``num_prefixes``, ``prefix_length`` or ``message_length`` is
            not positive, or ``turns`` is below 1.
    """

    rate: float
    """Requests per second of all conversations together."""
    num_requests: int
    max_length: int
    """Maximum number of tokens of prompt and answer together.

    A conversation ends before it exceeds this number.
    """
    num_prefixes: int = 64
    prefix_length: int = 400
    message_length: int = 40
    answer_length: int = 100
    turns: float = 3.0
    """Mean number of turns of a conversation that is not ended by the maximum length."""
    think_seconds: float = 10.0
    """Mean seconds from the end of an answer to the next turn of the conversation."""
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
    """The tokens of the user's message. In the first turn they include the system prompt."""
    num_new_tokens: int
    think_seconds: float
    """Seconds from the end of the previous answer to the arrival of the turn. Not used for the first turn."""


@dataclass(frozen=True, slots=True)
class SimulatedConversation:
    """The requests of one user."""

    name: str
    begin_time: float
    """Seconds from the start of the trace to the first turn."""
    turns: tuple[Turn, ...]


def make_trace(parameters: TraceParameters) -> list[SimulatedConversation]:
    """Return conversations in the order in which they begin, with ``num_requests`` turns in total.

    Equal parameters result in equal traces.
    """
    conversations: list[SimulatedConversation] = []
    num_requests_left, generator = parameters.num_requests, np.random.default_rng(parameters.seed)
    for turns in _draw_conversations(parameters, generator):
        first_turns = tuple(islice(turns, num_requests_left))
        conversations.append(SimulatedConversation(f"user-{len(conversations)}", 0.0, first_turns))
        num_requests_left -= len(first_turns)
        if num_requests_left <= 0:
            break
    mean_gap = parameters.num_requests / len(conversations) / parameters.rate
    gamma_shape = 1 / _BURSTINESS**2
    gaps = generator.gamma(gamma_shape, mean_gap / gamma_shape, len(conversations))
    start_times = np.cumsum(gaps) - gaps[0]
    return [
        SimulatedConversation(conversation.name, float(start_time), conversation.turns)
        for conversation, start_time in zip(conversations, start_times, strict=True)
    ]


def _draw_conversations(parameters: TraceParameters, generator: np.random.Generator) -> Iterator[list[Turn]]:
    """Yield the turns of an unlimited number of conversations, at least one turn each."""
    # An answer, and a prefix together with a message, have at most half_max_length tokens each, so that the
    # first turn fits into max_length.
    half_max_length = parameters.max_length // 2
    lengths = [
        _draw_length(generator, parameters.prefix_length, _PREFIX_SPREAD, half_max_length // 2)
        for _ in range(parameters.num_prefixes)
    ]
    prefixes = [generator.integers(0, parameters.vocab_size, length) for length in lengths]
    weights = 1 / np.arange(1, parameters.num_prefixes + 1)
    weights /= weights.sum()
    while True:
        prefix = prefixes[generator.choice(parameters.num_prefixes, p=weights)]
        turns: list[Turn] = []
        conversation_length = 0
        for turn_index in range(generator.geometric(1 / parameters.turns)):
            length = _draw_length(generator, parameters.message_length, _MESSAGE_SPREAD, half_max_length // 2)
            message = generator.integers(0, parameters.vocab_size, length)
            if not turn_index:
                message = np.concatenate([prefix, message])
            num_new_tokens = _draw_length(
                generator, parameters.answer_length, _ANSWER_SPREAD, half_max_length
            )
            conversation_length += len(message) + num_new_tokens
            if conversation_length > parameters.max_length:
                break
            turns.append(
                Turn(message, num_new_tokens, float(generator.exponential(parameters.think_seconds)))
            )
        yield turns


def _draw_length(generator: np.random.Generator, median: float, spread: float, maximum: int) -> int:
    """Draw a length from a log-normal distribution, from 1 to ``maximum``."""
    return max(1, min(round(median * float(np.exp(spread * generator.standard_normal()))), maximum))
