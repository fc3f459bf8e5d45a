"""A cache of JSON fragments of tokens. Responses with log probabilities mostly consist of such fragments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeAlias, TypeVar

from penstock.serve.api.json_parts import encode
from penstock.text.tokenizer import TextTokenizer

T = TypeVar("T")

MIN_LOGPROB = -9999.0
"""OpenAI's value for a token of probability 0, because JSON has no infinity."""

MAX_PART_COST = 1024
"""The cost at which a part of JSON is full. Encoding such a part takes about 1 ms.

A number has a cost of 1. A token whose JSON is not in the cache has an additional cost of
`UNCACHED_TOKEN_COST`.
"""
UNCACHED_TOKEN_COST = 64

NumberTemplate: TypeAlias = tuple[bytes, bytes, bytes]
"""The JSON before a number, an empty placeholder for the number, and the JSON after the number."""


class Fragments(dict[int, T]):
    """A dict: token id -> result of `make_fragment`, which is called when the token id is first used."""

    def __init__(self, make_fragment: Callable[[int], T]) -> None:
        super().__init__()
        self._make_fragment = make_fragment

    def __missing__(self, token_id: int) -> T:
        fragment = self[token_id] = self._make_fragment(token_id)
        return fragment


class TokenFragments:
    """Caches the JSON fragments of the tokens of a tokenizer.

    Args:
        tokenizer: the tokenizer of the model.
        as_ids: whether ``token_id:17`` is written instead of the text of a token.
    """

    def __init__(self, tokenizer: TextTokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self.chat_entries = Fragments(self._chat_entry)
        """The JSON around a chat log probability: ``,{"token":"a","logprob":`` and ``,"bytes":[97]}``."""
        self.completion_keys = Fragments(self._completion_key)
        """The JSON before a log probability of a completion: ``,"a":``."""
        self.prompt_entries = Fragments(self._prompt_entry)
        """The JSON around a prompt log probability: ``,"97":{"logprob":`` and ``,"decoded_token":"a"}``."""

    @property
    def num_cached(self) -> int:
        """The number of cached fragments."""
        return len(self.chat_entries) + len(self.completion_keys) + len(self.prompt_entries)

    def text(self, token_id: int) -> str:
        """Return the text of a token for log probabilities of completions; ``token_id:17`` with `as_ids`.

        If the bytes of a token are not valid UTF-8, the text is, for example, ``bytes:\\xe2\\x80``, as in
        OpenAI's API. Two such tokens therefore have different texts.
        """
        if self._as_ids:
            return self._token_text(token_id)
        token_bytes = self._tokenizer.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def _chat_entry(self, token_id: int) -> NumberTemplate:
        token_bytes = self._tokenizer.token_bytes(token_id)
        suffix = b',"bytes":%b}' % encode(list(token_bytes))
        return b',{"token":%b,"logprob":' % encode(self._token_text(token_id)), b"", suffix

    def _completion_key(self, token_id: int) -> NumberTemplate:
        return b",%b:" % encode(self.text(token_id)), b"", b""

    def _prompt_entry(self, token_id: int) -> NumberTemplate:
        suffix = b',"decoded_token":%b}' % encode(self._token_text(token_id))
        return b',"%d":{"logprob":' % token_id, b"", suffix

    def _token_text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


class NumberWriter:
    """Collects log probabilities and the JSON around them, and returns their JSON in parts.

    One call encodes all numbers of a part, because one call per number would take longer.

    Args:
        fragments: the cache of JSON fragments. Its growth is the number of new fragments in a part, see
            `MAX_PART_COST`.
    """

    def __init__(self, fragments: TokenFragments) -> None:
        self._fragments = fragments
        self._num_cached_before_part = fragments.num_cached
        self._json_parts: list[bytes] = []
        self._values: list[float] = []

    def add_row(
        self, prefix: bytes, templates: Iterable[NumberTemplate], values: Iterable[float], suffix: bytes
    ) -> None:
        """Add a row of one or more numbers.

        Args:
            prefix: the JSON before the row. It replaces the comma before the first number.
            templates: the JSON around each number. Each template begins with a comma.
            values: the numbers.
            suffix: the JSON after the row.

        Raises:
            ValueError: the row has no number.
        """
        start = len(self._json_parts)
        self._json_parts += chain.from_iterable(templates)
        self._values += values
        if start == len(self._json_parts):
            raise ValueError("a row has no number")
        self._json_parts[start] = prefix + self._json_parts[start][1:]
        self._json_parts[-1] += suffix

    @property
    def is_full(self) -> bool:
        """Whether the current part has reached the maximum cost."""
        num_new_fragments = self._fragments.num_cached - self._num_cached_before_part
        return len(self._values) + UNCACHED_TOKEN_COST * num_new_fragments >= MAX_PART_COST

    def part(self) -> bytes:
        """Return the JSON that was added since the last call."""
        self._json_parts[1::3] = encoded_numbers(self._values)
        data = b"".join(self._json_parts)
        self._json_parts, self._values = [], []
        self._num_cached_before_part = self._fragments.num_cached
        return data


def encoded_numbers(values: Sequence[float | None]) -> list[bytes]:
    """Return the JSON of each log probability, which is at least `MIN_LOGPROB`. None becomes null.

    >>> encoded_numbers([-0.5, None, float("-inf")])
    [b'-0.5', b'null', b'-9999.0']
    """
    if not values:
        return []
    finite_values = [
        None if value is None else value if value > MIN_LOGPROB else MIN_LOGPROB for value in values
    ]
    return encode(finite_values)[1:-1].split(b",")
