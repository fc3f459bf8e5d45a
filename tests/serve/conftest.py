"""Fixtures of the server tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _restored_logs() -> Iterator[None]:
    """Restore the log configuration, which a test may change."""
    logs = [logging.getLogger(name) for name in ("penstock", "uvicorn.error")]
    previous_settings = [(log.handlers, log.level, log.propagate) for log in logs]
    yield
    for log, (handlers, level, propagate) in zip(logs, previous_settings, strict=True):
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)
