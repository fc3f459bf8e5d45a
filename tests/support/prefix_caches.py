"""Fake engine clients with a prefix cache, for tests of the router."""

from __future__ import annotations

from typing import Any

import msgspec
from support.engines import WORKER_INFO, FakeEngine
from support.workers import make_request

from penstock.pipelines.core.cache_events import BlocksStored
from penstock.worker.routing import prompt_digests

CACHING_INFO = msgspec.structs.replace(WORKER_INFO, block_size=4, prefix_limits=[], max_batch_size=3)


def make_caching_engine(**fields: Any) -> FakeEngine:
    return FakeEngine(info=CACHING_INFO, is_paused=True, **fields)


def make_stored_event(prompt: str) -> BlocksStored:
    return BlocksStored(prompt_digests(make_request("", prompt), CACHING_INFO), None, [])
