"""The names of the activation functions, and the parameters of xIELU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""The activation functions without parameters. ``relu2(x)`` is ``relu(x)**2``."""


@dataclass(frozen=True, slots=True)
class XIELU:
    """The parameters of an xIELU activation (Huang and Schlag 2024, arXiv:2411.13010).

    For x > 0 it is ``slope * x + positive_factor * x**2``; otherwise
    ``slope * x + negative_factor * (exp(min(x, eps)) - 1 - x)``.
    """

    positive_factor: float
    negative_factor: float
    slope: float
    eps: float
