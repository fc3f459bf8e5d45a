"""A cache of the JSON of each token id, which makes up most of a response with log probabilities."""

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
"""Maximum cost of one part, about one millisecond. A number costs 1, and a token that is not cached yet costs
`COST_OF_TOKEN` more."""
COST_OF_TOKEN = 64

Number: TypeAlias = tuple[bytes, bytes, bytes]
"""The JSON before a number, a placeholder for the number, the JSON after it."""


class Fragments(dict[int, T]):
    """A cache of a function of token ids. The function is called once per id."""

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
        self.decoded = Fragments(self._decoded)
        """A log probability of the prompt: ``,"97":{"logprob":`` and ``,"decoded_token":"a"}``."""

    @property
    def num_made(self) -> int:
        """The number of cached fragments."""
        return len(self.entries) + len(self.keys) + len(self.decoded)

    def text(self, token_id: int) -> str:
        """Return the token's text for a completion.

        A token whose bytes are not valid UTF-8 is written as ``bytes:\\xe2\\x80``, as OpenAI does, so that
        two such tokens differ.
        """
        if self._as_ids:
            return self._shown(token_id)
        written = self._tokenizer.token_bytes(token_id)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)

    def _entry(self, token_id: int) -> Number:
        written = self._tokenizer.token_bytes(token_id)
        after = b',"bytes":%b}' % encode(list(written))
        return b',{"token":%b,"logprob":' % encode(self._shown(token_id)), b"", after

    def _key(self, token_id: int) -> Number:
        return b",%b:" % encode(self.text(token_id)), b"", b""

    def _decoded(self, token_id: int) -> Number:
        after = b',"decoded_token":%b}' % encode(self._shown(token_id))
        return b',"%d":{"logprob":' % token_id, b"", after

    def _shown(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


class NumberWriter:
    """Collects numbers and the JSON around them. All numbers of a part are encoded together.

    Args:
        fragments: the JSON of tokens; tokens that are encoded for the first time count as cost.
    """

    def __init__(self, fragments: TokenFragments) -> None:
        self._fragments = fragments
        self._num_made = fragments.num_made
        self._pieces: list[bytes] = []
        self._values: list[float] = []

    def add_row(self, before: bytes, places: Iterable[Number], values: Iterable[float], after: bytes) -> None:
        """Add a row of numbers; the comma before the first number is dropped.

        Args:
            before: JSON before the row.
            places: the JSON around each number, beginning with a comma.
            values: the numbers.
            after: JSON after the row.
        """
        start = len(self._pieces)
        self._pieces += chain.from_iterable(places)
        self._values += values
        if start == len(self._pieces):
            raise ValueError("a row has no number")
        self._pieces[start] = before + self._pieces[start][1:]
        self._pieces[-1] += after

    @property
    def is_full(self) -> bool:
        """Whether the part has reached the maximum cost."""
        made = self._fragments.num_made - self._num_made
        return len(self._values) + COST_OF_TOKEN * made >= MAX_COST

    def part(self) -> bytes:
        """Return the JSON added since the last call."""
        self._pieces[1::3] = numbers(self._values)
        data = b"".join(self._pieces)
        self._pieces, self._values = [], []
        self._num_made = self._fragments.num_made
        return data


def numbers(values: Sequence[float | None]) -> list[bytes]:
    """Return the JSON of each log probability, clamped to `MIN_LOGPROB`.

    >>> numbers([-0.5, None, float("-inf")])
    [b'-0.5', b'null', b'-9999.0']
    """
    if not values:
        return []
    clamped = [None if value is None else value if value > MIN_LOGPROB else MIN_LOGPROB for value in values]
    return encode(clamped)[1:-1].split(b",")
