"""A server with two workers: each worker is killed under load, and then a reload replaces both workers."""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.server_process import server_process

from penstock.host.processors import divide_processors

LONG_REQUEST = {"model": "demo", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}


class ServerClient:
    """A client of a server with two workers."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=60)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={**LONG_REQUEST, **fields})

    async def metric_per_worker(self, name: str) -> list[float]:
        text = (await self.http.get("/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        values = {
            sample.labels["worker"]: sample.value
            for sample in samples
            if sample.name == f"penstock_per_worker_{name}"
        }
        return [values["0"], values["1"]]

    async def start_four_per_worker(self, salt: str) -> list[asyncio.Task[httpx.Response]]:
        """Start eight requests. Return when four of the requests run on each worker.

        If a request ends earlier, wait for all eight requests and start eight other requests.
        """
        for attempt in count():
            running_tasks = [
                asyncio.create_task(self.complete(cache_salt=f"{salt}-{attempt}-{n}")) for n in range(8)
            ]
            while not any(task.done() for task in running_tasks):
                if await self.metric_per_worker("requests_running") == [4, 4]:
                    return running_tasks
                await asyncio.sleep(0.02)
            await asyncio.gather(*running_tasks)
        raise AssertionError

    async def wait_until(self, name: str, *expected: float) -> None:
        """Wait until a metric has the expected values for the two workers, in any order."""
        async with asyncio.timeout(60):
            while await self.metric_per_worker(name) not in [[*expected], [*expected[::-1]]]:
                await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_killed_worker_fails_only_its_requests_and_a_reload_fails_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with server_process(log, "--data-parallel-size", "2", "--max-length", "1024") as server:
        expected_processors = sorted(sorted(share.processors) for share in divide_processors(2))
        assert (
            sorted(sorted(os.sched_getaffinity(worker)) for worker in server.worker_pids)
            == expected_processors
        )
        client = ServerClient(server.url)
        expected = (await client.complete()).json()["choices"]
        for killed_worker in sorted(server.worker_pids):
            running_tasks = await client.start_four_per_worker(str(killed_worker))
            os.kill(killed_worker, signal.SIGKILL)
            await client.wait_until("up", 0, 1)
            later_tasks = [asyncio.create_task(client.complete(max_tokens=5)) for _ in range(4)]
            answers = await asyncio.gather(*running_tasks)
            assert [answer.json()["choices"] for answer in answers if answer.status_code == 200] == [
                expected
            ] * 4
            assert [answer.status_code for answer in answers].count(503) == 4
            assert [answer.status_code for answer in await asyncio.gather(*later_tasks)] == [200] * 4
            await client.wait_until("up", 1, 1)
        assert await client.metric_per_worker("restarts_total") == [1, 1]

        # During a reload, every request is answered.
        workers_before = set(server.worker_pids)
        reload_task = asyncio.create_task(client.http.post("/reload"))
        statuses = set()
        while not reload_task.done():
            answers = await asyncio.gather(*(client.complete(max_tokens=20) for _ in range(3)))
            statuses |= {answer.status_code for answer in answers}
        assert (reload_task.result().json(), statuses) == ({"status": "reloaded"}, {200})
        assert len(set(server.worker_pids) - workers_before) == 2
        assert (await client.complete()).json()["choices"] == expected
        await client.http.aclose()
    assert "Traceback" not in log.read_text()
