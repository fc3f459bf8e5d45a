"""The gate, and who is inside."""

from __future__ import annotations

import asyncio

from penstock.serve.gate import Gate


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
