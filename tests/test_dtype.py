"""`DType`: conversion of element types to and from torch and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.dtype import DType


@pytest.mark.parametrize("dtype", list(DType))
def test_conversion_to_torch_and_numpy_is_reversible(dtype: DType) -> None:
    assert DType.from_torch(dtype.to_torch()) is dtype
    assert dtype.size_in_bytes == dtype.to_torch().itemsize
    assert dtype.is_float() == dtype.to_torch().is_floating_point
    if dtype not in (DType.bfloat16, DType.float8_e4m3fn):
        assert DType.from_numpy(dtype.to_numpy()) is dtype
        assert dtype.to_numpy().itemsize == dtype.size_in_bytes


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float8_e4m3fn])
def test_types_that_numpy_lacks_are_refused(dtype: DType) -> None:
    with pytest.raises(TypeError, match=f"no {dtype.value}: convert to float32 first"):
        dtype.to_numpy()


def test_dtypes_without_an_equivalent_are_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        DType.from_torch(torch.complex64)
    with pytest.raises(ValueError, match="complex128"):
        DType.from_numpy(np.dtype("complex128"))
