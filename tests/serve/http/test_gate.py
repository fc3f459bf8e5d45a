"""`Gate` counts active requests, and is closed until the model is loaded and during shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.app_client import app_client, make_services

from penstock.serve.http.gate import Gate


async def test_the_gate_is_idle_after_the_last_request() -> None:
    gate = Gate()
    assert await gate.wait_until_idle(0)
    with gate.track():
        with gate.track():
            assert gate.num_active == 2
        assert gate.num_active == 1
        assert not await gate.wait_until_idle(0.01)
        idle_task = asyncio.create_task(gate.wait_until_idle(60))
        await asyncio.sleep(0)
    assert await idle_task
    with gate.track():
        assert not await gate.wait_until_idle(0)


async def test_a_gate_cannot_be_opened_after_it_was_closed() -> None:
    gate = Gate(is_open=False)
    assert "loaded" in gate.refusal_reason
    gate.open()
    assert gate.refusal_reason == ""
    gate.close()
    gate.open()
    assert "shutting down" in gate.refusal_reason


@pytest.mark.parametrize(("length", "is_read"), [(20_000, True), (10_000_000, False)])
async def test_only_a_short_body_is_read_completely_before_its_request_is_refused(
    length: int, is_read: bool
) -> None:
    """Closing a connection with unread bytes resets the connection. The client could lose the response."""
    num_sent_bytes = 0

    async def send_chunks() -> AsyncIterator[bytes]:
        nonlocal num_sent_bytes
        while num_sent_bytes < length:
            num_sent_bytes += 1000
            yield b" " * 1000

    services = make_services()
    services.gate.close()
    async with app_client(services) as client:
        response = await client.post(
            "/v1/completions", content=send_chunks(), headers={"content-type": "application/json"}
        )
    assert (response.status_code, response.headers["connection"]) == (503, "close")
    assert (num_sent_bytes == length) is is_read
    assert num_sent_bytes <= 70_000
