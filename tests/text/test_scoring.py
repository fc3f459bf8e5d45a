"""Similarities of vectors, rankings, and label names."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import InputError
from penstock.text.scoring import best_label, label_names, max_similarity, ranking, similarity

LEFT_VECTORS = np.array([[3.0, 4.0], [1.0, 0.0]], np.float32)
RIGHT_VECTORS = np.array([[4.0, 3.0], [0.0, 0.0]], np.float32)


@pytest.mark.parametrize(
    ("similarity_name", "expected"),
    [
        ("cosine", [24 / 25, 0.0]),
        ("dot", [24.0, 0.0]),
        ("euclidean", [-(2**0.5), -1.0]),
        ("manhattan", [-2.0, -1.0]),
    ],
)
def test_each_row_has_the_expected_similarity(similarity_name: str, expected: list[float]) -> None:
    assert similarity(LEFT_VECTORS, RIGHT_VECTORS, similarity_name) == pytest.approx(expected)


def test_an_unknown_similarity_is_refused() -> None:
    with pytest.raises(InputError, match=r"'hamming' is unknown: use cosine, dot, euclidean, manhattan"):
        similarity(LEFT_VECTORS, RIGHT_VECTORS, "hamming")


def test_ranking_is_stable_and_limited() -> None:
    scores = np.array([0.5, 0.9, 0.5, -1.0])
    assert ranking(scores) == [1, 0, 2, 3]
    assert ranking(scores, 2) == [1, 0]
    assert ranking(scores, 9) == [1, 0, 2, 3]
    with pytest.raises(InputError, match="top_n must be at least 1, was 0"):
        ranking(scores, 0)


def test_labels_have_the_configured_name_or_a_number() -> None:
    config = {"id2label": {"0": "negative", "1": "positive"}}
    assert label_names(config) == {0: "negative", 1: "positive"}
    assert best_label(config, np.array([0.1, 0.9])) == "positive"
    assert best_label({}, np.array([0.1, 0.9])) == "LABEL_1"


def test_max_similarity_sums_the_best_match_of_each_query_token() -> None:
    query = np.array([[1.0, 0.0], [0.0, 2.0]])
    document = np.array([[3.0, 1.0], [0.5, 4.0], [2.0, 2.0]])
    assert max_similarity(query, document) == 3 + 8
