"""Lookups and writes of rows in Triton's interpreter, with valid and invalid indices.

`test_interpreter.py` runs this file.
"""

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
def test_row_lookups_and_writes_equal_indexing_except_at_invalid_indices(
    ops: CudaOps, dtype: torch.dtype
) -> None:
    table = (100 * torch.randn(9, 120)).to(dtype)[:, 3:103]
    indices = torch.tensor([8, 0, 9, -1, 3])
    inside_rows, outside_rows = [0, 1, 4], [2, 3]
    for actual in (ops.embedding(indices, table), ops.take_rows(table, indices)):
        assert torch.equal(actual[inside_rows], table[indices[inside_rows]])
        assert (actual[outside_rows].isnan() if dtype.is_floating_point else actual[outside_rows] == 0).all()
    values = torch.randn(5, 100).to(dtype)
    actual = ops.put_rows(table, indices, values)
    assert torch.equal(actual, ReferenceOps().put_rows(table, indices[inside_rows], values[inside_rows]))


def test_rope_rows_equal_indexing_except_at_invalid_indices(ops: CudaOps) -> None:
    cos, sin = torch.randn(2, 7, 12)
    actual = ops.rope_rows(torch.tensor([6, 7, 0]), cos, sin[:, :])
    for rows, table in zip(actual, (cos, sin), strict=True):
        assert torch.equal(rows[[0, 2]], table[[6, 0]])
        assert rows[1].isnan().all()
