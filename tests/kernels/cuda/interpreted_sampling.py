"""Sampling in Triton's interpreter equals the reference. `test_interpreter.py` runs this file."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.float_activations import FloatActivations

from penstock.kernels import SamplingInputs
from penstock.kernels.cuda.ops import CudaOps

REFERENCE = FloatActivations()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ops() -> CudaOps:
    return CudaOps()


@pytest.mark.parametrize(
    "changed_rules",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.05, "temperature": 0.8},
    ],
    ids=str,
)
def test_sampled_tokens_equal_the_reference(ops: CudaOps, changed_rules: dict[str, float]) -> None:
    num_rows, rules = 3, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changed_rules
    inputs = SamplingInputs(
        torch.full((num_rows,), rules["temperature"]),
        torch.full((num_rows,), int(rules["top_k"])),
        torch.full((num_rows,), rules["top_p"]),
        torch.full((num_rows,), rules["min_p"]),
        torch.rand(num_rows, dtype=torch.float64),
    )
    logits = torch.randint(0, 6, (num_rows, 50)).bfloat16()  # many equal logits
    logits[1, 40] = torch.nan
    mask = torch.randint(-(2**31), 2**31, (num_rows, 2)).int()
    mask[2] = 0
    for allowed_mask in (None, mask):
        actual, expected = (back_end.sample(logits, inputs, allowed_mask) for back_end in (ops, REFERENCE))
        assert torch.equal(actual, expected)
        assert actual[1] == -1


@pytest.mark.parametrize(
    ("list_sizes", "dtype"),
    [
        ((1024, 4096), torch.float32),
        ((16, 1024), torch.bfloat16),
        ((16, 32), torch.float32),
        ((16, 32), torch.bfloat16),
    ],
    ids=["small list", "large list", "no list", "no list in bfloat16"],
)
def test_sampled_tokens_of_any_number_of_candidates_equal_the_reference(
    ops: CudaOps, dtype: torch.dtype, list_sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidates fit into the small list, only into the large list, or into neither.

    A row has five chunks.
    """
    monkeypatch.setattr("penstock.kernels.cuda.rows._CHUNK_LOGITS", 128)
    monkeypatch.setattr("penstock.kernels.cuda.rows._SMALL_LIST", list_sizes[0])
    monkeypatch.setattr("penstock.kernels.cuda.rows._LARGE_LIST", list_sizes[1])
    rules = [  # temperature, top_k, top_p, min_p
        (1.0, 0, 0.9, 0.0),
        (3.0, 0, 0.99, 0.1),
        (9.0, 0, 0.0, 0.0),
        (0.5, 300, 1.0, 0.0),
        (2.0, 90, 0.7, 0.0),
        (2.0, 599, 0.99999, 0.2),
        (1.0, 0, 1.0, 0.1),
        (0.0, 0, 0.5, 0.0),
    ]
    temperature, top_k, top_p, min_p = torch.tensor(rules).T.contiguous()
    logits = (2 * torch.randn(len(rules), 600)).to(dtype)
    logits[:, 200:300] = logits[:, 300:400]  # equal logits in different chunks
    mask = torch.randint(-(2**31), 2**31, (len(rules), 19)).int()
    uniforms = torch.tensor([0.0, 0.3, 1 - 2**-53, 0.9], dtype=torch.float64).repeat(2)
    inputs = SamplingInputs(temperature, top_k.long(), top_p, min_p, uniforms)
    for allowed_mask in (None, mask):
        actual, expected = (back_end.sample(logits, inputs, allowed_mask) for back_end in (ops, REFERENCE))
        assert torch.equal(actual, expected)


def test_rows_without_limits_need_no_candidate_lists(ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate lists take 2 bytes per logit. The second call allocates less by at least this size."""
    rules = [(0.0, 3, 0.5, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.2), (1.0, 1, 0.5, 0.0)]
    temperature, top_k, top_p, min_p = torch.tensor(rules).T.contiguous()
    logits = torch.randn(4, 3000)
    uniforms = torch.tensor([0.1, 0.5, 0.9, 0.2], dtype=torch.float64)
    limited_inputs = SamplingInputs(temperature, top_k.long(), top_p, min_p, uniforms)
    allocation_sizes = []

    def record_and_allocate(
        shape: int | tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        allocation_sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", record_and_allocate)
    for inputs in (limited_inputs, replace(limited_inputs, has_top_k_or_top_p=False).take(torch.arange(4))):
        assert torch.equal(ops.sample(logits, inputs), REFERENCE.sample(logits, inputs))
    limited_sizes, unlimited_sizes = (
        allocation_sizes[: len(allocation_sizes) // 2],
        allocation_sizes[len(allocation_sizes) // 2 :],
    )
    assert sum(limited_sizes) - sum(unlimited_sizes) >= 2 * logits.numel()
