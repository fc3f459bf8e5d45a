"""Lookups of rows in the interpreter, also with indices outside; `test_interpreter.py` runs this file."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.cuda.ops import CudaOps
from penstock.kernels.reference import ReferenceOps


@pytest.fixture
def ops() -> CudaOps:
    torch.manual_seed(0)
    return CudaOps()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_lookups(ops: CudaOps, dtype: torch.dtype) -> None:
    table = (100 * torch.randn(9, 120)).to(dtype)[:, 3:103]
    indices = torch.tensor([8, 0, 9, -1, 3])
    inside, filled = [0, 1, 4], [2, 3]
    for got in (ops.embedding(indices, table), ops.take_rows(table, indices)):
        assert torch.equal(got[inside], table[indices[inside]])
        assert (got[filled].isnan() if dtype.is_floating_point else got[filled] == 0).all()
    values = torch.randn(5, 100).to(dtype)
    got = ops.put_rows(table, indices, values)
    assert torch.equal(got, ReferenceOps().put_rows(table, indices[inside], values[inside]))


def test_rope_rows(ops: CudaOps) -> None:
    cos, sin = torch.randn(2, 7, 12)
    got = ops.rope_rows(torch.tensor([6, 7, 0]), cos, sin[:, :])
    for rows, table in zip(got, (cos, sin), strict=True):
        assert torch.equal(rows[[0, 2]], table[[6, 0]])
        assert rows[1].isnan().all()
