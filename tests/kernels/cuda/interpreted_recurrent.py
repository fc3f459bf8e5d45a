"""Linear attention in Triton's interpreter against the reference.

`test_interpreter.py` runs this file.
"""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import LayerState, Ops
from penstock.kernels.cuda.ops import CudaOps
from penstock.kernels.reference import ReferenceOps

REFERENCE = ReferenceOps()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_attention_agrees_with_the_reference(dtype: torch.dtype) -> None:
    """The batch has a new sequence of 4 rows, and a sequence that continues at position 5 with 2 rows."""
    torch.manual_seed(0)
    x, gates = torch.randn(6, 60).to(dtype)[:, 4:], torch.randn(6, 6).to(dtype)[:, 1:5]
    weight, decay = torch.randn(4, 56), torch.rand(2, 2)
    inputs, recurrent = torch.randn(5, 3, 56).to(dtype), torch.randn(5, 2, 8, 20)
    saves = torch.tensor([1, 3, 3, 4, 0, 0, 1, 1])
    row_offsets, lengths = torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor([4, 7], dtype=torch.int32)

    def run(ops: Ops) -> list[torch.Tensor]:
        state = LayerState(inputs.clone(), recurrent.clone(), torch.tensor([2, 0]), saves)
        qkv = ops.short_convolution(x, weight, state, row_offsets, lengths)
        out = ops.gated_delta_rule(qkv, gates, decay, state, row_offsets, lengths)
        gated = [ops.apply_gate(out, out.flip(2), "silu"), ops.apply_gate(out, out, "sigmoid")]
        return [qkv, out, state.inputs, state.recurrent, *gated]

    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for actual, expected in zip(run(CudaOps()), run(REFERENCE), strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
