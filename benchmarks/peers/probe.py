"""Measurement of the machine's current speed: memory bandwidth, and FLOP/s of matrix products."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

_NUM_BYTES = 256 << 20
_MATRIX_SIZE = 1536
_NUM_RUNS = 3


def probe() -> dict[str, float]:
    """Read 256 MiB and multiply 1536 x 1536 bfloat16 matrices with all threads of torch. Takes about 100 ms.

    Returns the GB/s of the read as ``gb_s`` and the TFLOP/s of the product as ``tflop_s``, each the best of 3
    runs.
    """
    import torch

    numbers = torch.ones(_NUM_BYTES // 4)
    square = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, dtype=torch.bfloat16)
    with torch.inference_mode():
        read = min(_seconds(lambda: numbers.sum()) for _ in range(_NUM_RUNS))
        product = min(_seconds(lambda: torch.nn.functional.linear(square, square)) for _ in range(_NUM_RUNS))
    return {"gb_s": _NUM_BYTES / read / 1e9, "tflop_s": 2 * _MATRIX_SIZE**3 / product / 1e12}


def _seconds(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start
