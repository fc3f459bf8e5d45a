"""Back end for plain CPUs: C++ kernels for several instruction sets.

>>> ops = load()  # None without a usable library
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from penstock.kernels.backend import Backend, DefaultSizes

if TYPE_CHECKING:
    from penstock.kernels.cpu.graphs import CpuGraphCompiler
    from penstock.kernels.cpu.ops import CpuOps
    from penstock.kernels.ops import Ops

__all__ = [
    "BACKEND",
    "available_isas",
    "cpu_features",
    "isa",
    "load",
    "variants",
]


def load() -> CpuOps | None:
    """Return the operations with the best instruction set of this CPU, capped by ``PENSTOCK_ISA``.

    Returns None and logs a warning once if there is no usable library.

    Raises:
        ConfigError: ``PENSTOCK_ISA`` names no instruction set.
    """
    from penstock.kernels.cpu.library import chosen_isa, open_kernels
    from penstock.kernels.cpu.ops import CpuOps

    best_isa = chosen_isa()
    if best_isa is None:
        _warn_missing()
        return None
    return CpuOps(open_kernels(best_isa))


def isa() -> str:
    """Return the instruction set of the kernels that `load` returns; ``none`` without a usable library.

    Raises:
        ConfigError: ``PENSTOCK_ISA`` names no instruction set.
    """
    from penstock.kernels.cpu.library import chosen_isa

    return chosen_isa() or "none"


def available_isas() -> tuple[str, ...]:
    """Return the instruction sets that this CPU supports, slowest first; empty without a usable library."""
    from penstock.kernels.cpu import library

    return library.available_isas()


def cpu_features() -> list[str]:
    """Return the features of this CPU that the kernels can use; empty without a usable library."""
    from penstock.kernels.cpu import library

    return library.cpu_features()


def variants() -> list[CpuOps]:
    """Return one `CpuOps` per instruction set that this CPU supports. For tests."""
    from penstock.kernels.cpu.library import available_isas, open_kernels
    from penstock.kernels.cpu.ops import CpuOps

    return [CpuOps(open_kernels(isa)) for isa in available_isas()]


def _graphs(ops: Ops) -> CpuGraphCompiler | None:
    from penstock.kernels.cpu.graphs import make_graph_compiler

    return make_graph_compiler(ops)


@cache
def _warn_missing() -> None:
    from penstock.kernels.cpu.library import PATH

    logging.getLogger(__name__).warning(
        "the C++ kernels are not built (%s is missing, or of another version): the reference kernels are "
        "used, many times slower. Install a C++ compiler and CMake, then: "
        "pip install --force-reinstall --no-deps penstock-llm",
        PATH,
    )


BACKEND = Backend(
    name="cpu",
    # Steps of more tokens take longer per token on a CPU, because their activations do not fit in the caches.
    default_sizes={"cpu": DefaultSizes(max_batch_size=32, step_tokens=1024)},
    load=load,
    variants=variants,
    priority=10,
    layout="panels",
    row_bytes=lambda bits, in_features: -(-in_features * bits // 8),
    graphs=_graphs,
)
