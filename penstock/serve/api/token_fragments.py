"""The JSON of tokens, encoded once for each token id and kept: most of an answer with log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeAlias, TypeVar

from penstock.serve.api.json_parts import encode
from penstock.text.tokenizer import TextTokenizer

T = TypeVar("T")

LEAST = -9999.0
"""OpenAI's number for a token that cannot come; JSON has no infinity."""

MAX_COST = 1024
"""Cost of one part: a number costs 1, and a token that is encoded for the first time `COST_OF_TOKEN` more.
About one millisecond."""
COST_OF_TOKEN = 64

Number: TypeAlias = tuple[bytes, bytes, bytes]
"""What stands before a number, the place of the number, what stands behind it."""


class Fragments(dict[int, T]):
    """What a function makes of each token id. The function is called once for each."""

    def __init__(self, make: Callable[[int], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> T:
        fragment = self[token_id] = self._make(token_id)
        return fragment


class TokenFragments:
    """Fragments of JSON for the tokens of a tokenizer.

    Args:
        tokenizer: of the model.
        as_ids: write ``token_id:17`` in place of a token's text.
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
        """How many fragments have been encoded."""
        return len(self.entries) + len(self.keys) + len(self.decoded)

    def text(self, token_id: int) -> str:
        """Return the token's text for a completion.

        Text that is not UTF-8 by itself is written ``bytes:\\xe2\\x80``, as OpenAI does, so that two such
        tokens differ.
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
        behind = b',"bytes":%b}' % encode(list(written))
        return b',{"token":%b,"logprob":' % encode(self._shown(token_id)), b"", behind

    def _key(self, token_id: int) -> Number:
        return b",%b:" % encode(self.text(token_id)), b"", b""

    def _decoded(self, token_id: int) -> Number:
        behind = b',"decoded_token":%b}' % encode(self._shown(token_id))
        return b',"%d":{"logprob":' % token_id, b"", behind

    def _shown(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


class NumberWriter:
    """Collects numbers with the JSON around them; the numbers of a part are encoded together.

    Args:
        fragments: the JSON of tokens. Those that are encoded meanwhile count as cost.
    """

    def __init__(self, fragments: TokenFragments) -> None:
        self._fragments = fragments
        self._num_made = fragments.num_made
        self._pieces: list[bytes] = []
        self._values: list[float] = []

    def add_row(
        self, before: bytes, places: Iterable[Number], values: Iterable[float], behind: bytes
    ) -> None:
        """Add numbers in a row, without the comma before the first of them.

        Args:
            before: stands before the row.
            places: the JSON around each number; begins with a comma.
            values: the numbers.
            behind: stands behind the row.
        """
        start = len(self._pieces)
        self._pieces += chain.from_iterable(places)
        self._values += values
        if start == len(self._pieces):
            raise ValueError("a row has no number")
        self._pieces[start] = before + self._pieces[start][1:]
        self._pieces[-1] += behind

    @property
    def is_full(self) -> bool:
        """Whether the part has cost as much as one may."""
        made = self._fragments.num_made - self._num_made
        return len(self._values) + COST_OF_TOKEN * made >= MAX_COST

    def part(self) -> bytes:
        """Return what was added since the last call."""
        self._pieces[1::3] = numbers(self._values)
        data = b"".join(self._pieces)
        self._pieces, self._values = [], []
        self._num_made = self._fragments.num_made
        return data


def numbers(values: Sequence[float | None]) -> list[bytes]:
    """Return the JSON of each log probability; none is below `LEAST`.

    >>> numbers([-0.5, None, float("-inf")])
    [b'-0.5', b'null', b'-9999.0']
    """
    if not values:
        return []
    least = [None if value is None else value if value > LEAST else LEAST for value in values]
    return encode(least)[1:-1].split(b",")
