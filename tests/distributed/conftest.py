"""Fixtures of this folder: two ranks, which load one model after the other, and a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.rank_pair import RankPair
from support.tiny_llm import write_tiny_llm


@pytest.fixture(scope="session")
def rank_pair() -> Iterator[RankPair]:
    """Return two ranks with the default transport."""
    rank_pair = RankPair()
    yield rank_pair
    rank_pair.close()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Llama with a tokenizer."""
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))
