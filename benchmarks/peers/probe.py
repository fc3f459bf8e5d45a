"""Measurement of the machine's current speed: memory bandwidth and matrix products. Reports list both."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

_BYTES = 256 << 20
_SIZE = 1536
_TRIES = 3


def probe() -> dict[str, float]:
    """Read 256 MiB and multiply bfloat16 matrices of 1536 x 1536 with all threads of torch.

    Returns the best of three tries as ``gb_s`` and ``tflop_s``. Takes about 100 ms.
    """
    import torch

    numbers = torch.ones(_BYTES // 4)
    square = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16)
    with torch.inference_mode():
        read = min(_seconds(lambda: numbers.sum()) for _ in range(_TRIES))
        product = min(_seconds(lambda: torch.nn.functional.linear(square, square)) for _ in range(_TRIES))
    return {"gb_s": _BYTES / read / 1e9, "tflop_s": 2 * _SIZE**3 / product / 1e12}


def _seconds(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start
