"""If the server is killed and restarted during a batch, each request of the batch has one result."""

from __future__ import annotations

import json
import time
from pathlib import Path

from openai import OpenAI
from support.server_process import ServerProcess, server_process

NUM_REQUESTS = 100


def open_client(server: ServerProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def wait_for_results(client: OpenAI, batch_id: str, count: int) -> str:
    """Wait until ``count`` requests of a batch have succeeded, or the batch is completed. Return its status.

    If ``count`` is `NUM_REQUESTS`, wait until the batch is completed.
    """
    deadline = time.monotonic() + 90
    while True:
        batch = client.batches.retrieve(batch_id)
        counts = batch.request_counts
        assert counts is not None
        if batch.status == "completed" or (count < NUM_REQUESTS and counts.completed >= count):
            return batch.status
        assert batch.status in ("validating", "in_progress", "finalizing"), batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)


def test_a_batch_survives_a_kill_of_the_server(tmp_path: Path) -> None:
    bodies = [
        {"model": "demo", "prompt": f"Say {number}.", "max_tokens": 8, "ignore_eos": True}
        for number in range(NUM_REQUESTS)
    ]
    lines = [
        json.dumps({"custom_id": f"n{number}", "method": "POST", "url": "/v1/completions", "body": body})
        for number, body in enumerate(bodies)
    ]
    flags = ("--state-dir", str(tmp_path / "state"), "--max-batch-size", "4")
    with server_process(tmp_path / "first", *flags) as server, open_client(server) as client:
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        assert wait_for_results(client, batch.id, 30) == "in_progress"
        server.process.kill()
        server.process.wait(30)
    with server_process(tmp_path / "second", *flags) as server, open_client(server) as client:
        assert wait_for_results(client, batch.id, NUM_REQUESTS) == "completed"
        batch = client.batches.retrieve(batch.id)
        assert batch.error_file_id is None
        assert batch.output_file_id is not None
        results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(result["custom_id"] for result in results) == sorted(
        f"n{number}" for number in range(NUM_REQUESTS)
    )
    assert {result["response"]["status_code"] for result in results} == {200}
