"""Division of the processors among worker processes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from penstock.host import processors
from penstock.host.processors import ProcessorShare, divide_processors, format_processors, pin


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Fake a machine with two NUMA nodes of two cores each. Processors n and n + 4 share a core."""
    for node, text in enumerate(("0-1,4-5", "2-3,6-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text + "\n")
    for number in range(8):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0")
        (topology / "core_id").write_text(str(number % 4))
    monkeypatch.setattr(processors, "_NODES", tmp_path)
    monkeypatch.setattr(processors, "_PROCESSORS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(processors.limits, "cores", lambda: None)
    return tmp_path


def test_shares_keep_nodes_and_cores_together(machine: Path) -> None:
    assert divide_processors(1) == (ProcessorShare((0, 4, 1, 5, 2, 6, 3, 7), 8),)
    assert divide_processors(2) == (ProcessorShare((0, 4, 1, 5), 4), ProcessorShare((2, 6, 3, 7), 4))
    assert [share.processors for share in divide_processors(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [share.num_threads for share in divide_processors(3)] == [3, 3, 2]


def test_workers_share_processors_if_there_are_more_workers_than_processors(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7})
    assert divide_processors(3) == (
        ProcessorShare((3,), 1),
        ProcessorShare((7,), 1),
        ProcessorShare((3,), 1),
    )


def test_a_cpu_limit_reduces_the_threads(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors.limits, "cores", lambda: 3.5)
    assert [str(share) for share in divide_processors(2)] == [
        "processors 0-1,4-5, 2 threads",
        "processors 2-3,6-7, 1 thread",
    ]
    monkeypatch.setattr(processors.limits, "cores", lambda: 0.5)
    assert [share.num_threads for share in divide_processors(2)] == [1, 1]


def test_without_topology_files_processors_are_divided_in_order(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "_NODES", machine / "missing")
    monkeypatch.setattr(processors, "_PROCESSORS", machine / "missing")
    assert processors.numa_nodes() == {0: tuple(range(8))}
    assert [share.processors for share in divide_processors(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize("text", ["0", "0-3", "0-1,4-5", "1,3,5-7", ""])
def test_processor_lists_are_parsed_and_formatted(text: str) -> None:
    assert format_processors(processors.parse_processors(text)) == text


def test_a_thread_inherits_the_pinning_of_its_parent() -> None:
    (processor, *_), affinities = sorted(os.sched_getaffinity(0)), []

    def run() -> None:
        pin([processor])
        child = threading.Thread(target=lambda: affinities.append(os.sched_getaffinity(0)))
        child.start()
        child.join()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert affinities == [{processor}]
