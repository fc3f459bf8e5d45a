"""Memory and CPU limits of a container or a service, read from control groups (cgroups) v1 and v2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from penstock import driver
from penstock.engine import InferenceSession
from penstock.host import limits

GIB = 2**30


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a folder that replaces the cgroup mount. `write_files` creates the folder.

    `set_membership` sets the groups of the process.
    """
    monkeypatch.setattr(limits, "_MOUNT", tmp_path / "mount")
    monkeypatch.setattr(limits, "_MEMBERSHIP", tmp_path / "member")
    return tmp_path / "mount"


def write_files(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def set_membership(mount: Path, *lines: str) -> None:
    (mount.parent / "member").write_text("".join(f"{line}\n" for line in lines))


def test_without_limits_the_result_is_none(mount: Path) -> None:
    assert (limits.memory(), limits.cores()) == (None, None)
    set_membership(mount, "0::/a")
    write_files(mount / "a", memory__max="max", memory__current=5, cpu__max="max 100000")
    assert (limits.memory(), limits.cores()) == (None, None)


def test_limits_of_a_container_are_read_from_cgroups_v2(mount: Path) -> None:
    set_membership(mount, "0::/")
    stat = f"anon {GIB}\nfile {4 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\nshmem {2 * GIB}"
    write_files(
        mount, memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=stat, cpu__max="150000 100000"
    )
    assert limits.memory() == (8 * GIB, 5 * GIB)  # usage excludes the file cache and includes shared memory
    assert limits.cores() == 1.5


def test_limits_of_parent_groups_apply(mount: Path) -> None:
    set_membership(mount, "0::/slice/service")
    write_files(mount / "slice", memory__max=6 * GIB, memory__current=5 * GIB, cpu__max="200000 100000")
    write_files(
        mount / "slice" / "service", memory__max=4 * GIB, memory__current=GIB, cpu__max="400000 100000"
    )
    assert limits.memory() == (4 * GIB, GIB)
    assert limits.cores() == 2


def test_usage_above_the_limit_leaves_no_memory(mount: Path) -> None:
    set_membership(mount, "0::/")
    write_files(mount, memory__max=GIB, memory__current=2 * GIB)
    assert limits.memory() == (GIB, 0)


def test_the_root_of_a_cgroup_v1_mount_may_be_the_group_of_the_process(mount: Path) -> None:
    set_membership(
        mount, "9:memory:/docker/1f", "4:cpu,cpuacct:/docker/1f", "1:name=systemd:/a", "0::/docker/1f"
    )
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    write_files(
        mount / "memory", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=2 * GIB, memory__stat=stat
    )
    write_files(mount / "cpu", cpu__cfs_quota_us=100000, cpu__cfs_period_us=50000)
    assert limits.memory() == (3 * GIB, 2 * GIB)
    assert limits.cores() == 2


def test_without_a_cpu_limit_in_cgroups_v1_the_number_of_cores_is_none(mount: Path) -> None:
    set_membership(mount, "4:cpu:/", "0::/")
    write_files(mount / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert limits.cores() is None


def test_a_group_outside_the_mount_is_ignored(mount: Path) -> None:
    set_membership(mount, "0::/../other")
    write_files(mount, cpu__max="300000 100000")
    write_files(mount.parent / "other", cpu__max="100000 100000")
    assert limits.cores() == 3


def test_host_memory_is_bounded_by_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    total, _ = driver._host_memory()
    monkeypatch.setattr(limits, "memory", lambda: (GIB, 1000))
    assert driver.CPU().stats == {"total_memory": GIB, "free_memory": 1000}
    monkeypatch.setattr(limits, "memory", lambda: (2**63, 2**63))
    assert driver._host_memory()[0] == total
    assert driver._host_memory()[1] <= total


@pytest.mark.parametrize(
    ("cpu_limit", "num_threads", "omp_num_threads", "expected_threads"),
    [
        (2.9, None, None, 2),
        (0.5, None, None, 1),
        (64.0, None, None, 3),
        (None, None, None, 3),
        (1.0, 2, None, 2),
        (1.0, None, "3", 3),
    ],
)
def test_the_cpu_limit_bounds_the_default_number_of_threads(
    cpu_limit: float | None,
    num_threads: int | None,
    omp_num_threads: str | None,
    expected_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU limit bounds the number of threads unless the caller or ``OMP_NUM_THREADS`` sets it."""
    monkeypatch.setattr(limits, "cores", lambda: cpu_limit)
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": omp_num_threads} if omp_num_threads else {})
    num_threads_before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        InferenceSession(num_threads=num_threads)
        assert torch.get_num_threads() == expected_threads
    finally:
        torch.set_num_threads(num_threads_before)
