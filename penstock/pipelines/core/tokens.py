"""`TokenBuffer`: the token array of a context and its indices. Only this class and subclasses change them.

    array   | prompt ............. | generated ..... | zeros ........................ |
            0                prompt_len             end              a multiple of CHUNK_SIZE

    0 <= start < active <= end <= capacity         0 <= committed         0 < prompt_len

    [0, start)        completed: computed, their keys and values are in the cache
    [start, active)   next_tokens: the tokens that the next step computes
    [active, end)     the rest of the tokens if they are computed in chunks; else empty
    [end, capacity)   unused

    [completion_start, completion_end)   generated output that was not returned yet

``committed`` is the number of leading tokens whose cache blocks are final. If ``active`` is below ``end``,
the next step computes a chunk of a prompt. ``update`` then moves the window to the rest.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import InputError

CHUNK_SIZE = 128
"""The capacity of a new array is a multiple of this number of tokens."""


class TokenBuffer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A growing array of token ids with a window of tokens to compute next (drawn at the top of the module).

    The constructor takes the prompt as ``tokens``, a one-dimensional integer array. It copies the values and
    keeps the dtype. The properties return views of the array. Callers must not write to them.
    """

    tokens: npt.NDArray[np.integer]
    """The whole array, including unused capacity. ``all_tokens`` is the used part."""

    _start_idx: int = 0
    _active_idx: int = -1
    _end_idx: int = -1  # -1 in a new buffer; a decoded buffer already has indices
    _committed_idx: int = 0
    _completion_start_idx: int = -1
    _completion_end_idx: int = -1
    _prompt_len: int = -1

    def __post_init__(self) -> None:
        if self._end_idx < 0:
            self._initialize()
        else:
            self.tokens = np.array(self.tokens)  # a writable copy
        self._check_indices(self._start_idx, self._active_idx, self._end_idx, self._committed_idx)

    @property
    def start_idx(self) -> int:
        """Start of the tokens to compute next. All earlier tokens are computed."""
        return self._start_idx

    @property
    def active_idx(self) -> int:
        """End of the tokens to compute next."""
        return self._active_idx

    @property
    def end_idx(self) -> int:
        """Number of all tokens."""
        return self._end_idx

    @property
    def committed_idx(self) -> int:
        """Number of leading tokens whose cache blocks are final."""
        return self._committed_idx

    @property
    def active_length(self) -> int:
        """Number of tokens to compute next: a whole prompt, a chunk of it, or the tokens of a decode step."""
        return self._active_idx - self._start_idx

    @property
    def current_length(self) -> int:
        """Number of all tokens, computed or not."""
        return self._end_idx

    @property
    def next_tokens(self) -> npt.NDArray[np.integer]:
        """The tokens to compute next, ``[active_length]``."""
        return self.tokens[self._start_idx : self._active_idx]

    @property
    def all_tokens(self) -> npt.NDArray[np.integer]:
        """Prompt and generated tokens, ``[current_length]``."""
        return self.tokens[: self._end_idx]

    @property
    def prompt_tokens(self) -> npt.NDArray[np.integer]:
        """The prompt."""
        return self.tokens[: self._prompt_len]

    @property
    def generated_tokens(self) -> npt.NDArray[np.integer]:
        """The tokens after the prompt, including an end-of-sequence token."""
        return self.tokens[self._prompt_len : self._end_idx]

    def set_token_indices(
        self,
        start_idx: int | None = None,
        active_idx: int | None = None,
        end_idx: int | None = None,
        committed_idx: int | None = None,
    ) -> None:
        """Set the given indices without changing tokens.

        Raises ``ValueError``, without a change, unless ``0 <= start < active <= end <= capacity`` and
        ``0 <= committed``.
        """
        start = self._start_idx if start_idx is None else start_idx
        active = self._active_idx if active_idx is None else active_idx
        end = self._end_idx if end_idx is None else end_idx
        committed = self._committed_idx if committed_idx is None else committed_idx
        self._check_indices(start, active, end, committed)
        self._start_idx, self._active_idx, self._end_idx = start, active, end
        self._committed_idx = committed

    def bump_token_indices(
        self, start_idx: int = 0, active_idx: int = 0, end_idx: int = 0, committed_idx: int = 0
    ) -> None:
        """Add the given differences to the indices. Raises the same errors as :meth:`set_token_indices`."""
        self.set_token_indices(
            self._start_idx + start_idx,
            self._active_idx + active_idx,
            self._end_idx + end_idx,
            self._committed_idx + committed_idx,
        )

    def advance(self) -> None:
        """Move the window past the tokens of a step whose result is not known yet.

        The window moves to the rest of a chunked prompt, or to a new placeholder token 0. Before ``update``
        appends the sampled token, the caller must move the window back with :meth:`set_token_indices`.
        """
        start = self._active_idx
        if start < self._end_idx:
            self._active_idx = self._end_idx
        else:
            self._append(0)
        self._start_idx = start

    def compute_num_available_steps(self, max_seq_len: int) -> int:
        """Return how many steps that compute one token each fit into ``max_seq_len``; may be 0 or less."""
        return max_seq_len - (self._end_idx - self._active_idx + self._start_idx)

    def boundary_before(self, idx: int) -> int:
        """Return the last index, at most ``idx``, at which the tokens can be split into two steps."""
        return idx

    def boundary_after(self, idx: int) -> int:
        """Return the first index, at least ``idx``, at which the tokens can be split into two steps."""
        return idx

    def rollback(self, idx: int) -> None:
        """Remove ``idx`` tokens before ``active_idx``, and all tokens after ``active_idx``.

        The last remaining token is computed next, even if it was computed before. Tokens that were already
        returned are not returned again. Does nothing if ``idx`` is 0.

        Raises ``ValueError``, without a change, if ``idx`` is negative or no token would remain.
        """
        if idx < 0:
            raise ValueError(f"cannot roll back {idx} tokens: the number must be at least 0")
        if idx == 0:
            return
        end = self._active_idx - idx
        start = min(self._start_idx, end - 1)
        if start < 0:
            raise ValueError(
                f"cannot rollback before the start of the array: {idx} tokens of {self._active_idx}"
            )
        self.tokens[end : self._end_idx] = 0
        self._start_idx, self._active_idx, self._end_idx = start, end, end
        self._committed_idx = min(self._committed_idx, start)
        self._completion_end_idx = min(self._completion_end_idx, end)

    def __eq__(self, other: object) -> bool:
        """Compare types and all fields by value, including arrays. Unused capacity is ignored."""
        if type(other) is not type(self):
            return NotImplemented
        return np.array_equal(self.all_tokens, other.all_tokens) and all(
            _is_equal(getattr(self, name), getattr(other, name))
            for name in self.__struct_fields__
            if name != "tokens"
        )

    def _initialize(self) -> None:
        tokens = np.asarray(self.tokens)
        if tokens.ndim != 1:
            raise InputError(f"tokens must be one dimensional array: got shape '{tokens.shape}'")
        if tokens.size == 0:
            raise InputError("tokens must hold at least one token: the prompt is empty")
        if tokens.dtype.kind not in "iu":
            raise InputError(f"tokens must be integers: got dtype {tokens.dtype}")
        self.tokens = _pad(tokens, -(-tokens.size // CHUNK_SIZE) * CHUNK_SIZE)
        self._end_idx = tokens.size
        for name in ("_active_idx", "_completion_start_idx", "_completion_end_idx", "_prompt_len"):
            if getattr(self, name) < 0:
                setattr(self, name, tokens.size)

    def _append(self, token: int) -> int:
        """Append ``token``, extend the window to it and return its position."""
        position = self._end_idx
        if position >= self.tokens.size:
            chunks = max(1, position // CHUNK_SIZE // 8)  # long sequences grow by 1/8: amortised O(1)
            self.tokens = _pad(self.tokens, self.tokens.size + chunks * CHUNK_SIZE)
        self.tokens[position] = token
        self._active_idx = self._end_idx = position + 1
        return position

    def _add_output(self, position: int) -> None:
        """Add the token at ``position``, which is the last token, to the output."""
        if self._completion_start_idx == self._completion_end_idx:
            self._completion_start_idx = position  # skips earlier tokens that are not part of the output
        self._completion_end_idx = position + 1

    def _check_indices(self, start: int, active: int, end: int, committed: int) -> None:
        if start < 0 or committed < 0:
            raise ValueError(
                f"start_idx ({start}) and committed_idx ({committed}) must be at least 0, "
                "unable to bump token indices."
            )
        if start >= active:
            raise ValueError(
                "active_idx must always be greater than start_idx, unable to bump token indices as "
                f"new start_idx ({start}) is greater than new active_idx ({active})."
            )
        if active > end:
            raise ValueError(
                "end_idx must always be greater than active_idx, unable to bump token indices as "
                f"new active_idx ({active}) is greater than new end_idx ({end})."
            )
        if end > self.tokens.size:
            raise ValueError(
                f"end_idx ({end}) must not exceed the size of the token array ({self.tokens.size}), "
                "unable to bump token indices."
            )


def _pad(tokens: npt.NDArray[np.integer], capacity: int) -> npt.NDArray[np.integer]:
    padded = np.zeros(capacity, dtype=tokens.dtype)
    padded[: tokens.size] = tokens
    return padded


def _is_equal(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return type(a) is type(b) and a == b
