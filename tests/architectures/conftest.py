"""Fixtures: a small random checkpoint of every decoder architecture, on disk and in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import DECODERS, load_in_transformers, write_checkpoint

ARCHITECTURES = DECODERS


@pytest.fixture(scope="session", params=ARCHITECTURES, ids=lambda architecture: architecture.name)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random checkpoint of a decoder architecture."""
    config = request.param.tiny_config()
    return write_checkpoint(tmp_path_factory.mktemp(request.param.name), config)


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Any:
    """Return the model that transformers loads from the checkpoint."""
    return load_in_transformers(checkpoint)
