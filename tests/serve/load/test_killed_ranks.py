"""A server whose model runs in two ranks (tensor parallelism). Each rank is killed under load."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.long_requests import send_request
from support.server_process import server_process


def find_other_ranks(worker_pid: int) -> list[int]:
    """Return the process ids of all ranks except rank 0, which is the worker."""
    children = Path(f"/proc/{worker_pid}/task/{worker_pid}/children").read_text().split()
    return [int(pid) for pid in children if b"distributed" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def wait_until_ended(*pids: int) -> None:
    async with asyncio.timeout(60):
        while any(map(is_running, pids)):
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_ranks_restart_after_a_kill_and_end_with_the_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with server_process(log, "--tensor-parallel-size", "2", "--max-length", "512") as server:
        expected = server.complete(temperature=0)["choices"]
        for round_number, killed_rank in enumerate((1, 0, 1), 1):
            worker = server.worker_pid
            assert worker is not None
            rank_pids = [worker, *find_other_ranks(worker)]
            assert len(rank_pids) == 2
            clients = [asyncio.ensure_future(send_request(server.port, index)) for index in range(30)]
            async with asyncio.timeout(60):
                while (await asyncio.to_thread(server.metrics))["penstock_requests_running"] < 8:
                    await asyncio.sleep(0.02)
            os.kill(rank_pids[killed_rank], signal.SIGKILL)
            outcomes = await asyncio.wait_for(asyncio.gather(*clients), 60)
            assert outcomes.count("error event") >= 1
            assert set(outcomes) <= {"error event", "503", "answered"}
            await wait_until_ended(*rank_pids)
            await asyncio.to_thread(server.wait_for_status, "/ready", 200)
            assert server.complete(temperature=0)["choices"] == expected
            metrics = await asyncio.to_thread(server.wait_until_idle)
            assert metrics["penstock_worker_restarts_total"] == round_number
        worker = server.worker_pid
        assert worker is not None
        rank_pids = [worker, *find_other_ranks(worker)]
        running_task = asyncio.ensure_future(send_request(server.port, 1))
        async with asyncio.timeout(60):
            while not (await asyncio.to_thread(server.metrics))["penstock_requests_running"]:
                await asyncio.sleep(0.02)
        server.process.kill()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(running_task, 60)
        await wait_until_ended(*rank_pids)
    assert "Traceback" not in log.read_text()
