"""Matrix products in Triton's interpreter that do not depend on the number of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def use_exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``tl.dot`` with a float32 operand accumulate in float64 and round the sum to float32.

    The interpreter calls numpy, whose BLAS may add a row in another order if the number of rows differs. A
    float64 sum rounds to the same float32 value in any order, so bit comparisons test only the kernel.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def create_exact_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32 or np.float32 not in (a.data.dtype, b.data.dtype):
            return create_dot(self, a, b, d, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return type(d)(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_exact_dot)
