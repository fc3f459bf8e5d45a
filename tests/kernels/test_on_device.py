"""``support.on_device``, which runs the operations of a back end on a device; here the device is the CPU."""

from __future__ import annotations

import torch
from support.on_device import on_device
from torch import Tensor

from penstock.kernels import LayerKV, PackedExperts
from penstock.kernels.reference import ReferenceOps


class RecordingOps(ReferenceOps):
    """Records the address of the argument ``x`` of each call of `rms_norm`."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.addresses.append(x.data_ptr())
        return super().rms_norm(x, weight, eps)


def test_operations_receive_copies_and_return_cpu_tensors() -> None:
    ops, x = on_device(RecordingOps(), "cpu"), torch.randn(3, 8)
    assert torch.equal(ops.rms_norm(x, torch.ones(8), 1e-5), ReferenceOps().rms_norm(x, torch.ones(8), 1e-5))
    assert isinstance(ops, RecordingOps)
    assert ops.addresses
    assert x.data_ptr() not in ops.addresses


def test_writes_to_the_kv_cache_are_copied_back() -> None:
    kv = LayerKV(
        torch.zeros(2, 2, 1, 4, 8, dtype=torch.int8),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([5]),
        scales=torch.zeros(2, 2, 1, 4),
    )
    rows = torch.randn(1, 1, 8)
    on_device(ReferenceOps(), "cpu").store_kv(rows, rows, kv)
    assert kv.cache[:, 1, 0, 1].any()
    assert kv.scales is not None
    assert kv.scales[:, 1, 0, 1].all()


def test_results_of_experts_on_a_device_equal_the_reference() -> None:
    pack = ReferenceOps().pack_linear
    experts = PackedExperts((pack(torch.randn(12, 8), "float32"),), (pack(torch.randn(8, 6), "int4"),))
    arguments = torch.randn(3, 8), experts, torch.ones(3, 1), torch.zeros(3, 1).long()
    expected = ReferenceOps().experts(*arguments, "silu")
    assert torch.equal(on_device(ReferenceOps(), "cpu").experts(*arguments, "silu"), expected)
