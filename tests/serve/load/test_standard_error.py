"""A server answers requests and stops cleanly although it cannot write to standard error."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import suppress

import httpx
import pytest


@pytest.mark.parametrize(
    "redirection",
    [
        "2>/dev/full",
        pytest.param("2>&-", marks=pytest.mark.slow),
        pytest.param("2> >(head -c 10 >/dev/null)", marks=pytest.mark.slow),
    ],
)
def test_the_server_answers_and_stops_without_a_writable_standard_error(redirection: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = f"exec {sys.executable} -m penstock serve --model demo --port {port} {redirection}"
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None
                assert time.monotonic() < deadline
                with suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                        break
                time.sleep(0.1)
            body = {"model": "demo", "prompt": "Once", "max_tokens": 3}
            for _ in range(3):
                assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body).status_code == 200
            process.terminate()
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, output) == (0, b"")
