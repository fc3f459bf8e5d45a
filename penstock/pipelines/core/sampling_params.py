"""The sampling parameters of a request."""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import numpy as np

from penstock.errors import InputError
from penstock.pipelines.core.parameter_hints import suggest_constructor_parameters
from penstock.plain_numbers import (
    checked_flag,
    checked_ids,
    checked_integer,
    checked_number,
    plain_real,
)


@suggest_constructor_parameters
@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request. The defaults select greedy decoding.

    The constructor checks every field. An invalid value (NaN, an infinity, a bool instead of a number, a
    number out of range) raises :class:`~penstock.errors.InputError`, which is a ``ValueError``. The message
    names the field and the value. Numbers of other types, such as numpy scalars, become plain Python numbers.
    """

    top_k: int = 1
    """Keep the ``top_k`` most probable tokens; 1 is greedy, -1 or 0 keeps all tokens."""
    top_p: float = 1
    """Keep the fewest most probable tokens, among those that ``top_k`` keeps, whose probabilities add up to
    at least ``top_p``; in [0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least ``min_p`` times the probability of the most probable token; in [0, 1], 0 is
    off. Combines with ``top_k`` and ``top_p``."""
    temperature: float = 1
    """Values above 1 flatten the distribution, values below 1 sharpen it; in [0, 2], 0 is greedy."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was generated; in [-2, 2]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that was generated; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Values above 1 make tokens of the prompt and the output less likely; greater than 0, 1 is off."""
    max_new_tokens: int | None = None
    """Maximum number of generated tokens; None means up to the model's maximum length."""
    min_new_tokens: int = 0
    """Minimum number of generated tokens before a token that ends the output is allowed."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence tokens of the model. Other stop conditions still apply."""
    stop: list[str] | None = None
    """Strings that end the output. The output does not include them."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output, in addition to the end-of-sequence tokens of the model."""
    detokenize: bool = True
    """Whether to decode the output to text."""
    seed: int = 0
    """Seed of the random numbers. Equal seeds give equal random numbers at equal positions of a sequence."""
    _: KW_ONLY
    logit_bias: dict[int, float] | None = None
    """Maps token ids to biases in [-100, 100], which are added to their logits before all other rules."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be generated. Include the tokens that end the output."""
    banned_token_ids: list[int] | None = None
    """Tokens that are never generated. The request ends with an error if a grammar allows no other token."""
    banned_sequences: list[list[int]] | None = None
    """Sequences of tokens that are never generated. The last token of a sequence is banned if the output ends
    with the tokens before it. The request ends with an error if a grammar allows no other token."""

    def __post_init__(self) -> None:
        for name, value in self._checked_fields().items():
            if value is not getattr(self, name):
                object.__setattr__(self, name, value)
        self._check_allowed_tokens()

    @cached_property
    def needs_penalties(self) -> bool:
        """Whether a penalty is set, so that logits depend on earlier tokens."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @cached_property
    def has_logit_rules(self) -> bool:
        """Whether a logit bias, allowed tokens, banned tokens or banned sequences are set."""
        rules = self.logit_bias or self.banned_token_ids or self.banned_sequences
        return bool(rules) or self.allowed_token_ids is not None

    @cached_property
    def changes_logits(self) -> bool:
        """Whether logits are adjusted before sampling: by rules, penalties or a minimum length."""
        return self.min_new_tokens > 0 or self.has_logit_rules or self.needs_penalties

    def _checked_fields(self) -> dict[str, object]:
        """Return each field as a plain Python value.

        Raises:
            InputError: a field is invalid. The message names the first such field.
        """
        numbers = {name: checked_number(name, getattr(self, name), *_RANGES[name]) for name in _RANGES}
        return {
            **numbers,
            "top_k": checked_integer(
                "top_k", self.top_k, minimum=-1, rule="-1 or 0 (all tokens) or at least 1"
            ),
            "max_new_tokens": None
            if self.max_new_tokens is None
            else checked_integer("max_new_tokens", self.max_new_tokens),
            "min_new_tokens": checked_integer("min_new_tokens", self.min_new_tokens),
            "seed": checked_integer(
                "seed", self.seed, minimum=-(2**63), maximum=2**64 - 1, rule="a 64-bit integer"
            ),
            "repetition_penalty": _checked_penalty(self.repetition_penalty),
            "ignore_eos": checked_flag("ignore_eos", self.ignore_eos),
            "detokenize": checked_flag("detokenize", self.detokenize),
            "stop": _checked_stop(self.stop),
            "stop_token_ids": checked_ids("stop_token_ids", self.stop_token_ids),
            "allowed_token_ids": checked_ids("allowed_token_ids", self.allowed_token_ids),
            "banned_token_ids": checked_ids("banned_token_ids", self.banned_token_ids),
            "banned_sequences": _checked_sequences("banned_sequences", self.banned_sequences),
            "logit_bias": _checked_bias(self.logit_bias),
        }

    def _check_allowed_tokens(self) -> None:
        """Check that ``allowed_token_ids``, if set, has a token that is not banned."""
        allowed = self.allowed_token_ids
        if allowed is None:
            return
        if not allowed:
            raise InputError("allowed_token_ids is empty: list at least one token, or omit it")
        single_ids = (ids[0] for ids in self.banned_sequences or () if len(ids) == 1)
        if not set(allowed).difference(self.banned_token_ids or (), single_ids):
            name = "banned_token_ids" if not self.banned_sequences else "banned_token_ids or banned_sequences"
            raise InputError(
                f"{name} has all of the {len(set(allowed))} tokens of allowed_token_ids: "
                "no token can be generated; allow more tokens or ban fewer"
            )


_RANGES = {
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "temperature": (0.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}


def _checked_penalty(penalty: object) -> float:
    number = plain_real(penalty)
    if number is None or not 0.0 < number <= sys.float_info.max:
        raise InputError(f"repetition_penalty must be greater than 0 and finite, was {penalty!r}")
    return number


def _checked_stop(stop: object) -> list[str] | None:
    if stop is None:
        return None
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise InputError(f"stop must be a list of strings, was {stop!r}")
    return [str(text) for text in stop]


def _checked_sequences(name: str, sequences: object) -> list[list[int]] | None:
    if sequences is None:
        return None
    if not isinstance(sequences, list) or not all(
        isinstance(ids, list | tuple | np.ndarray) and len(ids) for ids in sequences
    ):
        raise InputError(
            f"{name} must be a list of lists of token ids, none of them empty, was {sequences!r}"
        )
    return [checked_ids(name, ids) or [] for ids in sequences]


def _checked_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, dict):
        raise InputError(f"logit_bias must be a dict of token ids to numbers, was {bias!r}")
    return {
        checked_integer("logit_bias", token, rule="of token ids, integers of at least 0"): checked_number(
            f"logit_bias of token {token}", value, -100.0, 100.0
        )
        for token, value in bias.items()
    }
