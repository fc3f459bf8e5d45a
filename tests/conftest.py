"""Settings, options, fixtures and markers of all tests, and a guard against network access."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support.families import items_of_redundant_families
from support.gpu_mode import mark_gpu_tests, open_pipelines_on_gpu, selects_gpu
from support.matrix import items_outside_subset
from support.random_draws import (
    RANDOM_FACTOR,
    disable_module_constants,
    mark_property_tests,
    register_profiles,
)

# Modules and test items are never freed. The garbage collector is enabled after pytest has found all tests.
gc.disable()

# Set before the imports of torch, which reads OMP_NUM_THREADS, and of huggingface_hub, which reads
# HF_HUB_OFFLINE. Tiny models are fastest on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Without --random, property tests draw the same examples in every run. A new failure is then due to a code
# change.
register_profiles()

# A process that a shell starts in the background ignores SIGINT. Some tests send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of trained checkpoints, tokenizers and templates. Skip the test if it is missing."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no trained checkpoints next to the project ({SHARED_DATA})")
    return SHARED_DATA


@pytest.fixture
def _restore_num_threads() -> Iterator[None]:
    """Restore torch's number of threads after a test that changes it."""
    import torch

    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that connects to or looks up another machine, even if the code catches `Exception`."""
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _refuse_other_hosts(address[0])
        connect(self, address)

    def guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_other_hosts(host)
        return getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)


def _refuse_other_hosts(host: object) -> None:
    name = host.decode() if isinstance(host, bytes) else host
    if name not in (None, "", "localhost", "::1") and not str(name).startswith("127."):
        pytest.fail(f"a test tried to reach {name}: tests run without a network")


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, description in (("slow", "take long"), ("peers", "compare with other engines")):
        parser.addoption(f"--{name}", action="store_true", help=f"also run tests that {description}")
    parser.addoption(
        "--random",
        action="store_true",
        help=f"run property tests with {RANDOM_FACTOR} times as many examples, which are random, "
        "and also run tests marked random; -m random runs only these tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    if selects_gpu(config):
        open_pipelines_on_gpu()
    if config.getoption("--random"):
        settings.load_profile("random")
    else:
        disable_module_constants()


@pytest.hookimpl(tryfirst=True)  # must run before pytest applies `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--random"):
        mark_property_tests(items)
    for item in [*items_outside_subset(items), *items_of_redundant_families(items)]:
        item.add_marker(pytest.mark.slow)
    mark_gpu_tests(config, items)
    deselected_markers = {name for name in ("slow", "peers", "random") if not config.getoption(name)}
    selected, deselected = [], []
    for item in items:
        (deselected if deselected_markers & {mark.name for mark in item.iter_markers()} else selected).append(
            item
        )
    if deselected:  # deselected and not skipped, because reporting skipped tests takes seconds
        items[:] = selected
        config.hook.pytest_deselected(items=deselected)


def pytest_collection_finish() -> None:
    """Exclude modules and test items from garbage collection, which saves 0.3 s per run of the collector."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_report_header(config: pytest.Config) -> str | None:
    options = [f"--{name}" for name in ("slow", "peers", "random") if not config.getoption(name)]
    return f"tests of {', '.join(options)} are deselected" if options else None
