"""The memory planner counts at least the bytes that packed weights take on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from penstock.kernels import ENCODINGS, pack_linear
from penstock.kernels.cuda import BACKEND
from penstock.kernels.cuda.linear import packed_for_gpu


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("in_features", [256, 288, 1000])
def test_the_planned_size_is_at_least_the_packed_size(encoding: str, in_features: int) -> None:
    weight = torch.randn(128, in_features, generator=torch.Generator().manual_seed(0))
    packed = packed_for_gpu(pack_linear(weight, encoding))
    packed_size = sum(tensor.nbytes for tensor in packed.tensors.values())
    planned_size = BACKEND.num_bytes(ENCODINGS[encoding], 128, in_features)
    assert packed_size <= planned_size
    if in_features == 256:  # with 256 inputs, no layout has padding
        assert planned_size <= 1.02 * packed_size
