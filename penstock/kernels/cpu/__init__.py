"""Kernels in C++ for plain CPUs, AVX-512 or not.

>>> ops = load()  # None where the library was not built
"""

from __future__ import annotations

import logging
from functools import cache

from penstock.kernels.cpu.graph_cache import GraphCache
from penstock.kernels.cpu.library import (
    PATH,
    available_isas,
    chosen_isa,
    cpu_features,
    open_kernels,
)
from penstock.kernels.cpu.ops import CpuOps

__all__ = [
    "CpuOps",
    "GraphCache",
    "available_isas",
    "cpu_features",
    "isa",
    "load",
    "variants",
]


def load() -> CpuOps | None:
    """The back end with the best instruction set there is, ``PENSTOCK_ISA`` permitting.

    None where there is no usable library, which is said once.

    Raises:
        ConfigError: ``PENSTOCK_ISA`` names no instruction set.
    """
    chosen = chosen_isa()
    if chosen is None:
        _say_missing()
        return None
    return CpuOps(open_kernels(chosen))


def isa() -> str:
    """The instruction set of the kernels that `load` gives; ``none`` where there is no usable library."""
    return chosen_isa() or "none"


def variants() -> list[CpuOps]:
    """The back end once for each instruction set that this CPU runs: what the tests compare."""
    return [CpuOps(open_kernels(isa)) for isa in available_isas()]


@cache
def _say_missing() -> None:
    logging.getLogger(__name__).warning(
        "the C++ kernels are not built (%s is missing, or of another version): the reference kernels are "
        "used, many times slower. Install a C++ compiler and CMake, then: "
        "pip install --force-reinstall --no-deps penstock-llm",
        PATH,
    )
