"""How one request wants its tokens chosen."""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

from penstock.errors import InputError


@dataclass(frozen=True)
class SamplingParams:
    """The sampling of one request; the defaults are greedy.

    Every field is checked on construction: an impossible value (NaN, an infinity, a bool where a number
    belongs, a number out of range) raises :class:`~penstock.errors.InputError`, which is a ``ValueError``,
    with the field and the value in the message.
    """

    top_k: int = 1
    """Choose among the K most probable tokens; 1 is greedy, -1 or 0 keeps all tokens."""
    top_p: float = 1
    """Of the ``top_k`` tokens, keep the most probable that together reach this probability; in [0, 1]."""
    min_p: float = 0.0
    """Keep tokens that are at least this probable relative to the most probable one; in [0, 1], 0 is off.
    Combines with ``top_k`` and ``top_p``."""
    temperature: float = 1
    """Above 1 flattens the distribution, below 1 sharpens it; in [0, 2], 0 is greedy."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was generated; in [-2, 2]."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit once it was generated; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the prompt and the output less likely; greater than 0, 1 is off."""
    max_new_tokens: int | None = None
    """Generate at most this many tokens; None leaves it to the model's maximum length."""
    min_new_tokens: int = 0
    """No end-of-sequence token before this many tokens are generated."""
    ignore_eos: bool = False
    """Generate on past end-of-sequence tokens, up to the maximum length or a stop string."""
    stop: list[str] | None = None
    """Texts that end the output, which does not include them."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output, besides those of the model."""
    detokenize: bool = True
    """Whether the output is turned into text."""
    seed: int = 0
    """Seeds the random choice: equal seeds, prompts and parameters give equal output."""
    _: KW_ONLY
    logit_bias: dict[int, float] | None = None
    """Token id to what is added to its logit, before everything else; in [-100, 100]."""
    allowed_token_ids: list[int] | None = None
    """Only these are generated. The tokens that end the output are not exempt: name them too."""
    banned_token_ids: list[int] | None = None
    """These are never generated. Where a grammar allows nothing else, the grammar comes first."""

    banned_sequences: list[list[int]] | None = None
    """Sequences of tokens that are not generated: the last token of one is banned where the output ends with
    the tokens before it. Where a grammar allows nothing else, the grammar comes first."""

    def __post_init__(self) -> None:
        _check_integer("top_k", self.top_k, minimum=-1, rule="-1 or 0 (all tokens) or at least 1")
        _check_integer("max_new_tokens", 0 if self.max_new_tokens is None else self.max_new_tokens)
        _check_integer("min_new_tokens", self.min_new_tokens)
        _check_integer("seed", self.seed, minimum=-(2**63), maximum=2**64 - 1, rule="a 64-bit integer")
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("temperature", self.temperature, 0.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        penalty = self.repetition_penalty
        if not _is_number(penalty) or not 0.0 < penalty <= sys.float_info.max:
            raise InputError(f"repetition_penalty must be greater than 0 and finite, was {penalty!r}")
        if self.stop is not None and not _is_list_of(str, self.stop):
            raise InputError(f"stop must be a list of strings, was {self.stop!r}")
        _check_ids("stop_token_ids", self.stop_token_ids)
        _check_ids("allowed_token_ids", self.allowed_token_ids)
        _check_ids("banned_token_ids", self.banned_token_ids)
        _check_sequences("banned_sequences", self.banned_sequences)
        _check_bias(self.logit_bias)
        self._check_that_a_token_is_left()

    @cached_property
    def needs_penalties(self) -> bool:
        """True when a logit depends on the tokens so far."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @cached_property
    def has_logit_rules(self) -> bool:
        """True when some tokens are treated unlike the others in every step."""
        some = self.logit_bias or self.banned_token_ids or self.banned_sequences
        return bool(some) or self.allowed_token_ids is not None

    @cached_property
    def changes_logits(self) -> bool:
        """True when a step adjusts logits before it samples: rules, penalties, or a least length."""
        return self.min_new_tokens > 0 or self.has_logit_rules or self.needs_penalties

    def _check_that_a_token_is_left(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is None:
            return
        if not allowed:
            raise InputError("allowed_token_ids is empty: name at least one token, or leave it out")
        singles = (ids[0] for ids in self.banned_sequences or () if len(ids) == 1)
        if not set(allowed).difference(self.banned_token_ids or (), singles):
            name = "banned_token_ids" if not self.banned_sequences else "banned_token_ids or banned_sequences"
            raise InputError(
                f"{name} has all of the {len(set(allowed))} tokens of allowed_token_ids: "
                "nothing is left to generate"
            )


# Numbers are plain Python ones: bool is a subclass of int, and numpy's scalars cannot cross to the worker.


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _check_ids(name: str, ids: Any) -> None:
    if ids is None:
        return
    if not _is_list_of(int, ids):
        raise InputError(f"{name} must be a list of token ids, was {ids!r}")
    if ids and not 0 <= min(ids) <= max(ids) < 2**63:
        _check_integer(name, min(ids) if min(ids) < 0 else max(ids))


def _check_sequences(name: str, sequences: Any) -> None:
    if sequences is None:
        return
    if not _is_list_of(list, sequences) or not all(sequences):
        raise InputError(
            f"{name} must be a list of lists of token ids, none of them empty, was {sequences!r}"
        )
    for ids in sequences:
        _check_ids(name, ids)


def _check_bias(bias: Any) -> None:
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise InputError(f"logit_bias must be a dict of token ids to numbers, was {bias!r}")
    for token, value in bias.items():
        _check_integer("logit_bias", token, rule="of token ids, integers of at least 0")
        _check_number(f"logit_bias of token {token}", value, -100.0, 100.0)


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high:  # NaN fails the comparison too
        raise InputError(f"{name} must be in [{low}, {high}], was {value!r}")


def _check_integer(
    name: str,
    value: int,
    *,
    minimum: int = 0,
    maximum: int = 2**63 - 1,
    rule: str = "an integer of at least 0",
) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        raise InputError(f"{name} must be {rule}, was {value!r}")
