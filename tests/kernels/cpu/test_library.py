"""The shared library: when it is usable, the choice of the instruction set, and the OpenMP threads."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.kernels import cpu
from penstock.kernels.cpu import library

needs_library = pytest.mark.skipif(not library.PATH.exists(), reason="the C++ kernels are not built")


@pytest.fixture
def missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "libpenstock_cpu.so")
    cpu._warn_missing.cache_clear()


@pytest.mark.usefixtures("missing_library")
def test_a_missing_library_disables_the_back_end_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert [cpu.load(), cpu.load()] == [None, None]
    assert len(caplog.records) == 1
    assert "reference kernels are used" in caplog.text
    assert cpu.isa() == "none"
    assert cpu.cpu_features() == []
    assert cpu.variants() == []


@needs_library
def test_a_library_of_another_abi_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    cpu._warn_missing.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert cpu.load() is None
    assert "of another version" in caplog.text


def test_an_invalid_library_file_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libpenstock_cpu.so").write_bytes(b"no ELF")
    monkeypatch.setattr(library, "PATH", tmp_path / "libpenstock_cpu.so")
    assert cpu.isa() == "none"


@pytest.mark.parametrize(
    ("cap", "capability"), [("generic", "default"), ("avx2", "avx2"), ("avx512", None), (None, None)]
)
def test_penstock_isa_also_caps_the_instruction_set_of_torch(cap: str | None, capability: str | None) -> None:
    variables = ("PENSTOCK_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    code = "import os, penstock; print(os.environ.get('ATEN_CPU_CAPABILITY'))"
    completed = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | ({"PENSTOCK_ISA": cap} if cap else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.strip() == str(capability)


@needs_library
def test_the_best_instruction_set_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_ISA", raising=False)
    assert cpu.isa() == cpu.available_isas()[-1]
    assert [ops.isa for ops in cpu.variants()] == list(cpu.available_isas())


@needs_library
def test_detected_cpu_features_are_flags_in_proc_cpuinfo() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "flags" not in cpuinfo.read_text():
        pytest.skip("/proc/cpuinfo has no flags of an x86 CPU")
    flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split()
    actual = {name.replace("avx512vnni", "avx512_vnni").replace("avx512bf16", "avx512_bf16")
             for name in cpu.cpu_features()}  # fmt: skip
    assert actual <= set(flags)
    assert ("avx2" in actual) == ("avx2" in flags)
    assert ("avx2" in cpu.available_isas()) == ({"avx2", "fma"} <= actual)


@needs_library
@pytest.mark.parametrize("cap", library.ISAS)
def test_the_environment_caps_the_instruction_set(monkeypatch: pytest.MonkeyPatch, cap: str) -> None:
    monkeypatch.setenv("PENSTOCK_ISA", cap)
    ops = cpu.load()
    assert ops is not None
    assert ops.isa == cpu.isa() == (cap if cap in cpu.available_isas() else cpu.available_isas()[-1])


@needs_library
def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ISA", "sse9")
    with pytest.raises(ConfigError, match=r"'sse9'.*generic, avx2, avx512_vnni, avx512") as error:
        cpu.load()
    assert error.value.field == "PENSTOCK_ISA"


@needs_library
def test_inline_functions_have_a_symbol_for_each_instruction_set() -> None:
    """Of inline functions with the same symbol the linker keeps one, and the kept one could need AVX-512."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("needs nm, to list the symbols of the library")
    symbols = subprocess.run([nm, library.PATH], capture_output=True, text=True, check=True).stdout
    weak_symbols = re.findall(r"^[0-9a-f]+ [WVu] (\w+)", symbols, re.MULTILINE)
    assert [name for name in weak_symbols if not any(isa in name for isa in library.ISAS)] == []


@needs_library
def test_the_kernels_use_the_openmp_library_of_torch() -> None:
    """Two copies of the OpenMP library would start two thread pools and run three times as slowly."""
    code = """
from penstock.kernels import cpu
import torch

def count_threads():
    with open("/proc/self/status") as status:
        return next(line.split()[1] for line in status if line.startswith("Threads:"))

ops, x = cpu.load(), torch.randn(2048, 256)
x @ x.T
num_threads_before = count_threads()
ops.rms_norm(x, torch.ones(256), 1e-5)
with open("/proc/self/maps") as maps:
    print(len({line.split()[5] for line in maps if "gomp" in line or "iomp" in line}))
print(count_threads() == num_threads_before, torch.get_num_threads())
"""
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system has no /proc")
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PENSTOCK_ISA": "generic"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout.split() == ["1", "True", "2"], result.stderr
