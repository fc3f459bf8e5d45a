"""Shared by all tests: settings, trained checkpoints, and a guard against network access."""

from __future__ import annotations

import gc
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support.families import items_of_similar_families
from support.gpu_mode import mark_tests_of_gpus, open_pipelines_on_gpu, selects_gpu
from support.matrix import items_beyond_cover
from support.random_draws import (
    RANDOM_FACTOR,
    draw_no_constants_of_modules,
    mark_property_tests,
    register_profiles,
)

gc.disable()  # until the tests are collected: imports and test items are never freed

# Before anything imports torch or huggingface_hub: tiny models are fastest on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Every run draws the same examples, so that a failure is due to a change of the code.
register_profiles()

# A shell that starts the tests in the background makes them ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of trained checkpoints, tokenizers and templates next to the project."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no trained checkpoints next to the project ({SHARED_DATA})")
    return SHARED_DATA


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that connects to another machine, even if the code under test handles the error."""
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
    for name, what in (("slow", "take long"), ("peers", "compare with other engines")):
        parser.addoption(f"--{name}", action="store_true", help=f"run the tests that {what}, too")
    parser.addoption(
        "--random",
        action="store_true",
        help="draw the examples of property tests at random, "
        f"{RANDOM_FACTOR} times as many, and run the tests marked random, too; -m random runs these alone",
    )


def pytest_configure(config: pytest.Config) -> None:
    if selects_gpu(config):
        open_pipelines_on_gpu()
    if config.getoption("--random"):
        settings.load_profile("random")
    else:
        draw_no_constants_of_modules()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--random"):
        mark_property_tests(items)
    for item in [*items_beyond_cover(items), *items_of_similar_families(items)]:
        item.add_marker(pytest.mark.slow)
    mark_tests_of_gpus(config, items)
    left_out = {name for name in ("slow", "peers", "random") if not config.getoption(name)}
    kept, deselected = [], []
    for item in items:
        (deselected if left_out & {mark.name for mark in item.iter_markers()} else kept).append(item)
    if deselected:  # reporting thousands of skipped tests would take seconds
        items[:] = kept
        config.hook.pytest_deselected(items=deselected)


def pytest_collection_finish() -> None:
    """Exclude modules and test items from garbage collections, which would take 0.3 s each."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_report_header(config: pytest.Config) -> str | None:
    left_out = [f"--{name}" for name in ("slow", "peers", "random") if not config.getoption(name)]
    return f"tests of {', '.join(left_out)} are deselected" if left_out else None
