"""A cache of the JSON of tokens, which is most of a response with log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeAlias, TypeVar

from penstock.serve.api.json_parts import encode
from penstock.text.tokenizer import TextTokenizer

T = TypeVar("T")

MIN_LOGPROB = -9999.0
"""OpenAI's value for a token of probability 0; JSON has no infinity."""

MAX_COST = 1024
"""Maximum cost of one part, which takes about 1 ms to encode.

A number costs 1. A token whose JSON is not cached yet costs `UNCACHED_TOKEN_COST` more.
"""
UNCACHED_TOKEN_COST = 64

Number: TypeAlias = tuple[bytes, bytes, bytes]
"""The JSON before a number, a placeholder for the number, the JSON after it."""


class Fragments(dict[int, T]):
    """A cache of the results of `make`, which is called once per token id."""

    def __init__(self, make: Callable[[int], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> T:
        fragment = self[token_id] = self._make(token_id)
        return fragment


class TokenFragments:
    """Fragments of JSON for the tokens of a tokenizer.

    Args:
        tokenizer: the tokenizer of the model.
        as_ids: write ``token_id:17`` instead of the text of a token.
    """

    def __init__(self, tokenizer: TextTokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self.entries = Fragments(self._entry)
        """A chat's log probability: ``,{"token":"a","logprob":`` and ``,"bytes":[97]}``."""
        self.keys = Fragments(self._key)
        """A completion's log probability: ``,"a":``."""
        self.decoded = Fragments(self._decoded_fragment)
        """A log probability of the prompt: ``,"97":{"logprob":`` and ``,"decoded_token":"a"}``."""

    @property
    def num_cached(self) -> int:
        """The number of cached fragments."""
        return len(self.entries) + len(self.keys) + len(self.decoded)

    def text(self, token_id: int) -> str:
        """Return the token's text for a completion.

        A token whose bytes are not valid UTF-8 is written as ``bytes:\\xe2\\x80``, as OpenAI does, so that
        two such tokens differ.
        """
        if self._as_ids:
            return self._token_text(token_id)
        token_bytes = self._tokenizer.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def _entry(self, token_id: int) -> Number:
        token_bytes = self._tokenizer.token_bytes(token_id)
        suffix = b',"bytes":%b}' % encode(list(token_bytes))
        return b',{"token":%b,"logprob":' % encode(self._token_text(token_id)), b"", suffix

    def _key(self, token_id: int) -> Number:
        return b",%b:" % encode(self.text(token_id)), b"", b""

    def _decoded_fragment(self, token_id: int) -> Number:
        suffix = b',"decoded_token":%b}' % encode(self._token_text(token_id))
        return b',"%d":{"logprob":' % token_id, b"", suffix

    def _token_text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


class NumberWriter:
    """Collects log probabilities and the JSON around them.

    All numbers of a part are encoded in one call, which is faster than one call per number.

    Args:
        fragments: the JSON of tokens; tokens that are encoded for the first time count as cost.
    """

    def __init__(self, fragments: TokenFragments) -> None:
        self._fragments = fragments
        self._num_cached = fragments.num_cached
        self._json_parts: list[bytes] = []
        self._values: list[float] = []

    def add_row(
        self, prefix: bytes, surroundings: Iterable[Number], values: Iterable[float], suffix: bytes
    ) -> None:
        """Add a row of numbers; the comma before the first number is dropped.

        Args:
            prefix: JSON before the row.
            surroundings: the JSON around each number, beginning with a comma.
            values: the numbers.
            suffix: JSON after the row.
        """
        start = len(self._json_parts)
        self._json_parts += chain.from_iterable(surroundings)
        self._values += values
        if start == len(self._json_parts):
            raise ValueError("a row has no number")
        self._json_parts[start] = prefix + self._json_parts[start][1:]
        self._json_parts[-1] += suffix

    @property
    def is_full(self) -> bool:
        """Whether the part has reached the maximum cost."""
        num_new = self._fragments.num_cached - self._num_cached
        return len(self._values) + UNCACHED_TOKEN_COST * num_new >= MAX_COST

    def part(self) -> bytes:
        """Return the JSON added since the last call."""
        self._json_parts[1::3] = numbers(self._values)
        data = b"".join(self._json_parts)
        self._json_parts, self._values = [], []
        self._num_cached = self._fragments.num_cached
        return data


def numbers(values: Sequence[float | None]) -> list[bytes]:
    """Return the JSON of each log probability, clamped to `MIN_LOGPROB`.

    >>> numbers([-0.5, None, float("-inf")])
    [b'-0.5', b'null', b'-9999.0']
    """
    if not values:
        return []
    finite_values = [
        None if value is None else value if value > MIN_LOGPROB else MIN_LOGPROB for value in values
    ]
    return encode(finite_values)[1:-1].split(b",")
