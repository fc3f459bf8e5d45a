"""Fixtures: a small checkpoint, and adapters for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.adapters import write_adapter
from support.checkpoints import write_checkpoint

from penstock.architectures.llama import tiny_config


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), tiny_config())


@pytest.fixture(scope="session")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return three adapters of different ranks on different layers."""
    folder = tmp_path_factory.mktemp("adapters")
    settings = {
        "all": {"r": 5},
        "some": {"r": 3, "target_modules": ["q_proj", "up_proj", "down_proj"]},
        "head": {"r": 2, "target_modules": ["lm_head", "v_proj"]},
    }
    return {
        name: write_adapter(checkpoint, folder / name, seed, **config)
        for seed, (name, config) in enumerate(settings.items())
    }
