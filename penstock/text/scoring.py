"""Scores of pairs of texts from their embeddings, rankings, and names of labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError

_Array: TypeAlias = npt.NDArray[Any]


def similarity(first: _Array, second: _Array, kind: str) -> _Array:
    """Return the similarity of the rows of two arrays ``[n, E]``: ``[n]``; distances are negated.

    Raises:
        InputError: the kind is unknown.
    """
    if kind not in _SIMILARITIES:
        raise InputError(f"similarity_fn_name {kind!r} is unknown: use {', '.join(_SIMILARITIES)}")
    return _SIMILARITIES[kind](first, second)


def ranking(scores: _Array, top_n: int | None = None) -> list[int]:
    """Return the indices of the highest scores, the highest first; equal scores keep their order.

    Args:
        scores: ``[n]``.
        top_n: the number of indices; None returns all.

    Raises:
        InputError: ``top_n`` is below 1.
    """
    if top_n is not None and top_n < 1:
        raise InputError(f"top_n must be at least 1, was {top_n}")
    return [int(i) for i in np.argsort(-scores, kind="stable")[:top_n]]


def label_names(config: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of a classifier's labels by index, from ``id2label``."""
    labels = config.get("id2label") or {}
    return {int(index): str(labels[index]) for index in labels}


def best_label(config: Mapping[str, Any], scores: _Array) -> str:
    """Return the name of the label with the highest score; ``LABEL_<index>`` if it has no name.

    Args:
        config: the checkpoint's ``config.json``.
        scores: ``[labels]``.
    """
    best = int(scores.argmax())
    return label_names(config).get(best, f"LABEL_{best}")


def _cosine(first: _Array, second: _Array) -> _Array:
    norms: _Array = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    products: _Array = (first * second).sum(1)
    return products / np.maximum(norms, 1e-12)


_SIMILARITIES: Mapping[str, Callable[[_Array, _Array], _Array]] = {
    "cosine": _cosine,
    "dot": lambda first, second: cast("_Array", (first * second).sum(1)),
    "euclidean": lambda first, second: cast("_Array", -np.linalg.norm(first - second, axis=1)),
    "manhattan": lambda first, second: cast("_Array", -np.abs(first - second).sum(1)),
}
