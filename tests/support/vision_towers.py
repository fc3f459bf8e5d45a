"""Random weights and comparisons for vision encoders of transformers."""

from __future__ import annotations

from typing import Any

import torch


def randomize(module: Any) -> Any:
    """Set all parameters to random values, so that a missing bias or norm changes the results."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_scale = parameter.dim() == 1 and name.endswith(
                ("norm.weight", "1.weight", "2.weight", "ln_q.weight")
            )
            parameter.copy_(0.2 * torch.randn_like(parameter) + is_scale)
    return module.eval()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5 * max(1.0, float(expected.std())), rtol=0)
