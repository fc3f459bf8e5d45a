"""Checks token ids of callers, and filters token ids of configurations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError

TokenIds: TypeAlias = npt.NDArray[np.int64]


def checked_prompt_ids(ids: Sequence[int] | npt.NDArray[np.integer], vocab_size: int) -> TokenIds:
    """Return the token ids of a prompt as an array, which is empty if ``ids`` is empty.

    Raises:
        InputError: ``ids`` is text, bytes, an array without dimensions, or neither a sequence nor an array;
            or an element is not an id of the vocabulary. The message contains the first such element.
    """
    is_text_or_bytes = isinstance(ids, str | bytes | bytearray | memoryview)
    if is_text_or_bytes or not isinstance(ids, Sequence | np.ndarray):
        raise InputError(f"a prompt is text or a list of token ids, not {type(ids).__name__}")
    if isinstance(ids, np.ndarray) and ids.ndim == 0:
        raise InputError("a prompt is text or a list of token ids, not an array without dimensions")
    values = ids.tolist() if isinstance(ids, np.ndarray) else ids
    # fast path for lists of plain integers in the vocabulary
    if {*map(type, values)} == {int} and 0 <= min(values) <= max(values) < vocab_size:
        return np.array(values, dtype=np.int64)
    for index, value in enumerate(values):
        if not _is_id(value, vocab_size):
            raise InputError(
                f"token {index} of the prompt is {value!r}: ids are integers from 0 to {vocab_size - 1}"
            )
    return np.array([int(value) for value in values], dtype=np.int64)


def checked_ids_to_decode(ids: Iterable[SupportsIndex]) -> list[int]:
    """Return token ids as plain integers. Ids that are not in the vocabulary are allowed.

    Raises:
        InputError: an element is not an integer from 0 to 2**32 - 1.
    """
    values = list(ids)
    for token_id in values:
        if not _is_id(token_id, 2**32):
            raise InputError(f"{token_id!r} is not a token id: ids are integers from 0 to {2**32 - 1}")
    return [int(token_id) for token_id in values]


def unique_ids_below(vocab_size: int, *sources: Iterable[int]) -> tuple[int, ...]:
    """Return the distinct ids of all sources from 0 to ``vocab_size - 1``, in order of first occurrence.

    Some configurations contain ids of a larger model of the same family, which the model cannot sample.
    """
    return tuple(dict.fromkeys(token_id for ids in sources for token_id in ids if 0 <= token_id < vocab_size))


def _is_id(value: object, vocab_size: int) -> bool:
    return isinstance(value, int | np.integer) and type(value) is not bool and 0 <= int(value) < vocab_size
