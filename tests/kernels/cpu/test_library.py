"""The shared library: the choice of the instruction set, and the threads of the kernels."""

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

built = pytest.mark.skipif(not library.PATH.exists(), reason="the C++ kernels are not built")


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "libpenstock_cpu.so")
    cpu._warn_missing.cache_clear()


@pytest.mark.usefixtures("missing")
def test_without_the_library_there_is_no_back_end_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert [cpu.load(), cpu.load()] == [None, None]
    assert len(caplog.records) == 1
    assert "reference kernels are used" in caplog.text
    assert cpu.isa() == "none"
    assert cpu.cpu_features() == []
    assert cpu.variants() == []


@built
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
def test_torch_is_capped_too(cap: str | None, capability: str | None) -> None:
    names = ("PENSTOCK_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    code = "import os, penstock; print(os.environ.get('ATEN_CPU_CAPABILITY'))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | ({"PENSTOCK_ISA": cap} if cap else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str(capability)


@built
def test_the_best_instruction_set_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_ISA", raising=False)
    assert cpu.isa() == cpu.available_isas()[-1]
    assert [ops.isa for ops in cpu.variants()] == list(cpu.available_isas())


@built
def test_features_agree_with_the_kernel_of_the_system() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "flags" not in cpuinfo.read_text():
        pytest.skip("this system lists no flags of an x86 CPU")
    flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split()
    found = {name.replace("avx512vnni", "avx512_vnni").replace("avx512bf16", "avx512_bf16")
             for name in cpu.cpu_features()}  # fmt: skip
    assert found <= set(flags)
    assert ("avx2" in found) == ("avx2" in flags)
    assert ("avx2" in cpu.available_isas()) == ({"avx2", "fma"} <= found)


@built
@pytest.mark.parametrize("cap", library.ISAS)
def test_the_environment_caps_the_instruction_set(monkeypatch: pytest.MonkeyPatch, cap: str) -> None:
    monkeypatch.setenv("PENSTOCK_ISA", cap)
    ops = cpu.load()
    assert ops is not None
    assert ops.isa == cpu.isa() == (cap if cap in cpu.available_isas() else cpu.available_isas()[-1])


@built
def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ISA", "sse9")
    with pytest.raises(ConfigError, match=r"'sse9'.*generic, avx2, avx512_vnni, avx512") as error:
        cpu.load()
    assert error.value.field == "PENSTOCK_ISA"


@built
def test_instruction_sets_have_separate_symbols() -> None:
    """The linker keeps one copy of equal inline functions. It must not be a copy that needs AVX-512."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("needs nm, to list the symbols of the library")
    symbols = subprocess.run([nm, library.PATH], capture_output=True, text=True, check=True).stdout
    weak = re.findall(r"^[0-9a-f]+ [WVu] (\w+)", symbols, re.MULTILINE)
    assert [name for name in weak if not any(isa in name for isa in library.ISAS)] == []


@built
def test_the_kernels_share_the_threads_of_torch() -> None:
    """Two copies of the OpenMP library would start two teams of threads and run three times as slowly."""
    code = """
from penstock.kernels import cpu
import torch

def threads():
    with open("/proc/self/status") as status:
        return next(line.split()[1] for line in status if line.startswith("Threads:"))

ops, x = cpu.load(), torch.randn(2048, 256)
x @ x.T
before = threads()
ops.rms_norm(x, torch.ones(256), 1e-5)
with open("/proc/self/maps") as maps:
    print(len({line.split()[5] for line in maps if "gomp" in line or "iomp" in line}))
print(threads() == before, torch.get_num_threads())
"""
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system has no /proc")
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PENSTOCK_ISA": "generic"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout.split() == ["1", "True", "2"], result.stderr
