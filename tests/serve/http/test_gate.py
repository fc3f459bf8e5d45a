"""The gate, and who is inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.serving import client_of, make_services

from penstock.serve.http.gate import Gate


async def test_it_is_empty_when_the_last_has_left() -> None:
    gate = Gate()
    assert await gate.emptied(0)
    with gate.inside():
        with gate.inside():
            assert gate.num_inside == 2
        assert gate.num_inside == 1
        assert not await gate.emptied(0.01)
        waiting = asyncio.create_task(gate.emptied(60))
        await asyncio.sleep(0)
    assert await waiting
    with gate.inside():
        assert not await gate.emptied(0)


async def test_once_closed_it_stays_closed() -> None:
    gate = Gate(is_open=False)
    assert "loaded" in gate.reason
    gate.open()
    assert gate.reason == ""
    gate.close()
    gate.open()
    assert "shutting down" in gate.reason


@pytest.mark.parametrize(("length", "is_taken_in"), [(20_000, True), (10_000_000, False)])
async def test_a_short_body_is_read_before_its_request_is_refused(length: int, is_taken_in: bool) -> None:
    """Or the connection, closed with bytes unread, might be reset and the answer be lost."""
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < length:
            sent += 1000
            yield b" " * 1000

    services = make_services()
    services.gate.close()
    async with client_of(services) as client:
        response = await client.post(
            "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
        )
    assert (response.status_code, response.headers["connection"]) == (503, "close")
    assert (sent == length) is is_taken_in
    assert sent <= 70_000
