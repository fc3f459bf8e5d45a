"""`upload`, `uploaded_together` and `UploadBatch`, on the CPU."""

from __future__ import annotations

import numpy as np
import torch

from penstock.kernels import upload, uploaded_together
from penstock.kernels.device_queue import UploadBatch

CPU = torch.device("cpu")


def test_a_batch_copies_arrays_of_several_types_to_aligned_memory() -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4)[:, :3]
    arrays = [np.array([5, -7], np.int64), table, np.array([True]), np.zeros((2, 0)), np.array([0.25])]
    batch = UploadBatch(CPU, 200, is_pinned=False)
    tensors = [batch.add(array) for array in arrays]
    assert tensors[3] is None, "an empty array must not be added"
    batch.copy()
    for tensor, array in zip(tensors, arrays, strict=True):
        if tensor is not None:
            assert tensor.dtype == torch.from_numpy(array).dtype
            assert tensor.data_ptr() % 16 == 0
            assert np.array_equal(tensor.numpy(), array)


def test_an_array_beyond_the_capacity_is_not_added_and_a_smaller_array_is() -> None:
    batch = UploadBatch(CPU, 64, is_pinned=False)
    five_values = batch.add(np.arange(5))
    assert batch.add(np.arange(3)) is None
    two_values = batch.add(np.arange(2))
    batch.copy()
    assert five_values is not None
    assert two_values is not None
    assert (five_values.tolist(), two_values.tolist()) == ([0, 1, 2, 3, 4], [0, 1])


def test_uploads_to_the_cpu_share_the_memory_of_the_array() -> None:
    values = np.arange(3)
    with uploaded_together(CPU):
        tensor = upload(values, CPU)
    values[0] = 9
    assert tensor.tolist() == [9, 1, 2]
