"""Fixtures that write a tiny embeddings model, a tiny cross-encoder and a tiny classifier."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_embedder import write_tiny_embedder


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an embeddings model with prompts and the Matryoshka dimensions 8 and 16. Return its folder."""
    return write_tiny_embedder(
        tmp_path_factory.mktemp("embedder"),
        settings={"prompts": {"query": "query: ", "document": "passage: "}},
        matryoshka_dimensions=[8, 16],
    )


@pytest.fixture(scope="session")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a cross-encoder, which is a classifier with one label. Return its folder."""
    return write_tiny_embedder(tmp_path_factory.mktemp("cross_encoder"), labels=1)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a classifier with three labels. Return its folder."""
    return write_tiny_embedder(tmp_path_factory.mktemp("classifier"), labels=3)
