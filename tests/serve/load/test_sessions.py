"""Requests of a session stay with one of two workers. A header or the user field names the session."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from support.server_process import server_process
from support.sessions import stays_with_its_worker


@pytest.mark.slow
@pytest.mark.parametrize("header", ["X-Session-ID", "X-Conversation"])
async def test_a_session_stays_with_its_worker(tmp_path: Path, header: str) -> None:
    flags = ["--data-parallel-size", "2", "--max-length", "1024", "--session-header", header]
    with server_process(tmp_path / "log", *flags) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            assert not await stays_with_its_worker(client, "none")
            assert await stays_with_its_worker(client, "header", {header: "a"})
            assert await stays_with_its_worker(client, "user", user="b")
            # The server ignores other headers, so this request has no session.
            assert not await stays_with_its_worker(client, "other", {"X-Other": "c"})
