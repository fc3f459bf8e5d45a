"""Operations on arguments without a C++ kernel run on the reference. Each cause is logged once."""

from __future__ import annotations

import logging

import pytest
import torch

from penstock.kernels import LayerKV, cpu
from penstock.kernels.cpu.library import open_kernels
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.reference import ReferenceOps

variants = cpu.variants()
pytestmark = pytest.mark.skipif(not variants, reason="the C++ kernels are not built")


@pytest.fixture
def ops() -> CpuOps:
    return CpuOps(open_kernels(variants[-1].isa))


def run_attention(ops: ReferenceOps, head_dim: int) -> torch.Tensor:  # [2, 1, D]
    generator = torch.Generator().manual_seed(head_dim)
    cache = torch.randn(2, 3, 1, 16, head_dim, generator=generator)
    kv = LayerKV(cache, torch.tensor([[1]], dtype=torch.int32), torch.tensor([16, 17]))
    q = torch.randn(2, 1, head_dim, generator=generator)
    row_offsets, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    return ops.attention(q, kv, row_offsets, lengths, scale=1.0)


def test_each_cause_is_logged_once(ops: CpuOps, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="penstock"):
        for head_dim in (12, 12, 20, 12):
            result = run_attention(ops, head_dim)
            assert torch.equal(result, run_attention(ReferenceOps(), head_dim))
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(":")[0] for message in messages] == [
        "attention runs on the reference kernels, which are slower"
    ] * 2
    assert "a head size of 12 (a multiple of 8, at most 1024)" in messages[0]
    assert "a head size of 20" in messages[1]


def test_nothing_is_logged_for_supported_arguments(ops: CpuOps, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="penstock"):
        run_attention(ops, 16)
        ops.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5)
        ops.scale(torch.ones(2, 8), 2.0)
    assert not caplog.records


def test_the_message_names_the_operation_and_the_activation_type(
    ops: CpuOps, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="penstock"):
        ops.scale(torch.ones(2, 8, dtype=torch.float16), 2.0)
        ops.rms_norm(torch.ones(2, 8, dtype=torch.float16), torch.ones(8), 1e-5)
    scale_message, norm_message = (record.getMessage() for record in caplog.records)
    assert scale_message.startswith("scale runs")
    assert scale_message.endswith("do not support torch.float16 activations")
    assert norm_message.startswith("rms_norm runs")
