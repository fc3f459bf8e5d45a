"""The worker process is killed under load. Each client gets one error or a response. The worker restarts."""

from __future__ import annotations

import asyncio

import httpx
from support.long_requests import PATHS, send_request
from support.server_process import ServerProcess


async def test_requests_of_a_killed_worker_get_one_error_or_a_response_and_the_worker_restarts(
    server: ServerProcess,
) -> None:
    expected = server.complete(temperature=0)["choices"]
    num_restarts_before = server.wait_until_idle()["penstock_worker_restarts_total"]
    clients = [asyncio.ensure_future(send_request(server.port, index)) for index in range(60)]
    while server.metrics()["penstock_requests_running"] < 8:
        await asyncio.sleep(0.02)
    killed_worker = server.kill_worker()
    outcomes = await asyncio.wait_for(asyncio.gather(*clients), 60)
    # The killed worker had running and waiting requests.
    assert outcomes.count("error event") >= 1
    assert outcomes.count("503") >= 1
    assert set(outcomes) <= {"error event", "503", "answered"}

    server.wait_for_status("/health", 503)
    for path in PATHS:
        assert await send_request(server.port, 0, path) in ("503", "answered")
    assert httpx.get(f"{server.url}/v1/models").status_code == 200  # routes that need no worker respond

    await asyncio.to_thread(server.wait_for_status, "/ready", 200)
    await asyncio.to_thread(server.wait_for_status, "/health", 200)
    assert server.worker_pid not in (None, killed_worker)
    assert server.complete(temperature=0)["choices"] == expected
    assert server.wait_until_idle()["penstock_worker_restarts_total"] == num_restarts_before + 1
