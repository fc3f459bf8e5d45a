"""A server of the demo model in a separate process, which tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.server_process import ServerProcess, server_process


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with server_process(log, "--max-length", "512", "--max-queue-size", "400") as running_server:
        yield running_server
        assert running_server.process.poll() is None, log.read_text()
    assert "Traceback" not in log.read_text()
