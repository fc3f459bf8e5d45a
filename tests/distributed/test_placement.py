"""Placement of ranks: NUMA nodes, processors and threads."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from penstock.cli import cli
from penstock.distributed import placement
from penstock.host import processors


@pytest.mark.parametrize(
    ("world_size", "expected"), [(2, [(0, 1, 2, 3), (4, 5, 6, 7)]), (4, [(0, 1), (2, 3), (4, 5), (6, 7)])]
)
def test_each_rank_is_bound_to_processors_of_one_numa_node(
    monkeypatch: pytest.MonkeyPatch, world_size: int, expected: list[tuple[int, ...]]
) -> None:
    for module in (placement, processors):
        monkeypatch.setattr(module, "numa_nodes", lambda: {0: (0, 1, 2, 3, 12), 1: (4, 5, 6, 7)})
    monkeypatch.setattr(processors, "_core_id", lambda number: (0, number))
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [share.processors for share in placement.rank_processors(world_size)] == expected


def test_ranks_on_one_numa_node_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "numa_nodes", lambda: {0: (0, 1)})
    assert placement.rank_processors(2) == ()


def test_env_shows_threads_and_processors_of_ranks() -> None:
    arguments = ["env", "--tensor-parallel-size", "2"]
    report = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).output)
    assert len(report["ranks"]) == 2
    assert "threads on" in report["ranks"][1]
    assert "rank 1" in CliRunner().invoke(cli, arguments).output
