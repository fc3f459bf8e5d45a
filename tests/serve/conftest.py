"""Fixtures of the server tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _restored_logs() -> Iterator[None]:
    """Restore the log configuration, which a test may change."""
    loggers = [logging.getLogger(name) for name in ("penstock", "uvicorn.error")]
    previous_settings = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, previous_settings, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
