"""The limit on private memory: mapped files do not count. `is_exceeded` recognizes errors at the limit."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.host import private_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit exists on Linux only")

SCRIPT = """
import sys
from pathlib import Path
import torch
from penstock.host import private_memory
from penstock.driver import CPU
from penstock.weights.mapping import map_file, map_in_huge_pages

MIB = 1 << 20
assert private_memory.free() is None
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
private_memory.set_limit(used + 200 * MIB)
free = private_memory.free()  # unlike VmData, excludes the mapped data of libraries
assert 190 * MIB < free < 400 * MIB, free
assert CPU().stats["free_memory"] <= free
file = Path(sys.argv[1])
mapped = [map_file(file), map_in_huge_pages(file)]
assert abs(private_memory.free() - free) < 20 * MIB, (private_memory.free(), free)
allocation = bytearray(100 * MIB)
errors = []
for allocate in (lambda: bytearray(free), lambda: torch.empty(free, dtype=torch.uint8)):
    try:
        allocate()
    except Exception as error:
        errors.append(error)
assert [private_memory.is_exceeded(error) for error in errors] == [True, True], errors
del mapped
private_memory.exempt_mapped_files()
assert free - private_memory.free() >= 100 * MIB
"""


def test_mapped_files_do_not_count_and_allocations_beyond_the_limit_fail(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    with file.open("wb") as stream:
        stream.truncate(600 << 20)  # three times the 200 MiB that the script adds to its used memory
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_is_exceeded_recognizes_errors_of_exhausted_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    system_error = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert not private_memory.is_exceeded(MemoryError())
    monkeypatch.setattr(private_memory, "_limit", 1 << 40)
    request_error = RuntimeError("a request failed")
    request_error.__cause__ = MemoryError()
    with pytest.raises(RuntimeError) as torch_error:
        torch.empty(1 << 60, dtype=torch.uint8)
    for error in (
        MemoryError(),
        system_error,
        request_error,
        RuntimeError("std::bad_alloc"),
        torch_error.value,
    ):
        assert private_memory.is_exceeded(error)
    for unrelated_error in (ValueError("no"), OSError(errno.ENOSPC, "No space")):
        assert not private_memory.is_exceeded(unrelated_error)
