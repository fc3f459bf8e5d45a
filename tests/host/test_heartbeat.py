"""Heartbeat: Python and kernels count progress in a file that another process reads."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.host import heartbeat
from penstock.host.heartbeat import ProgressFile
from penstock.kernels.cpu import library


def test_a_process_reads_the_counter_of_another_process(tmp_path: Path) -> None:
    file = ProgressFile(str(tmp_path / "progress"))
    assert file.count == 0
    script = (
        "import sys; from penstock.host import heartbeat; heartbeat.publish(sys.argv[1])\n"
        "for _ in range(300): heartbeat.beat()\n"
        "import ctypes; assert ctypes.c_int64.from_address(heartbeat.counter_address()).value == 300"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "progress")], check=True)
    assert file.count == 300
    file.close()


def read_count() -> int:
    return ctypes.c_int64.from_address(heartbeat.counter_address()).value


def test_the_module_imports_neither_torch_nor_numpy() -> None:
    script = "import penstock.host.heartbeat, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.skipif(not library.is_usable(), reason="no kernels are built")
def test_one_kernel_call_increments_the_counter_several_times() -> None:
    from penstock.driver import DeviceSpec, load_devices
    from penstock.engine import InferenceSession

    ops = InferenceSession(load_devices([DeviceSpec.cpu()])).ops
    layer = ops.pack_linear([torch.zeros(4096, 512)], "float32", bias=None, slices=())
    count_before = read_count()
    ops.linear(torch.zeros(600, 512), layer)
    assert read_count() - count_before >= 10


def test_loading_tensors_and_running_layers_increments_the_counter() -> None:
    count_before = read_count()
    llm = LLM("demo", max_length=256)
    count_after_load = read_count()
    assert count_after_load - count_before >= 20, "one increment per loaded tensor"
    llm.generate("Hello", SamplingParams(max_new_tokens=1))
    assert read_count() - count_after_load >= 2, "one increment per layer"
