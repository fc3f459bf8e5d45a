"""The shared library of kernels: finding it, and choosing the instruction set."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch  # noqa: F401  # first: the library shares the copy of libgomp.so.1 that torch brings

from penstock.errors import ConfigError

ISAS = ("generic", "avx2", "avx512")
"""The instruction sets there are kernels for, ascending."""

PATH = Path(__file__).with_name("libpenstock_cpu.so")

ABI = 4
"""The layout of the kernels' arguments; ``penstock_abi`` in csrc/host.cpp says which one a library has."""

Kernel = Callable[..., int | None]

_ARGUMENTS = {
    "rms_norm": "2q 3P 5q d",
    "add_rms_norm": "2q 5P 4q d",
    "rotary": "q 6P 9q",
    "store_kv": "2q 4P 9q",
    "gated_activation": "2q 2P 3q",
    "take_rows": "3P 4q",
    "linear": "2q P q 4P 4q",
    "pack": "2q P q 3P 2q",
    "lora": "q P q 3P q 3P 4q",
    "attention": "2q 7P 10q 2d",
    "sample": "q P 3q 6P q P",
}
"""The struct of arguments that each kernel takes, as in csrc: q integer, P pointer (0 for none), d double."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one instruction set, as functions of pointers and numbers in the order of csrc."""

    isa: str
    rms_norm: Kernel
    add_rms_norm: Kernel
    rotary: Kernel
    store_kv: Kernel
    gated_activation: Kernel
    take_rows: Kernel
    linear: Kernel
    pack: Kernel
    lora: Kernel
    attention: Kernel
    sample: Kernel
    long_linear: Kernel
    long_lora: Kernel
    long_attention: Kernel
    long_sample: Kernel
    """``long_``: released the GIL while it runs. Taking it back beside a busy thread costs 100 us, so that
    what takes less keeps it."""


@cache
def open_kernels(isa: str) -> Kernels:
    """The kernels compiled for ``isa``; the library must be there."""
    held, released = ctypes.PyDLL(str(PATH)), ctypes.CDLL(str(PATH))
    functions = {name: _function(held, name, isa) for name in _ARGUMENTS}
    for name in ("linear", "lora", "attention", "sample"):
        functions[f"long_{name}"] = _function(released, name, isa)
    return Kernels(isa, **functions)


def is_usable() -> bool:
    """Whether the library is there, and of the ABI that this module speaks."""
    if not PATH.exists():
        return False
    try:
        return bool(ctypes.PyDLL(str(PATH)).penstock_abi() == ABI)
    except (OSError, AttributeError):  # built for another machine, or before there was a number
        return False


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this CPU runs, ascending; empty where there is no usable library."""
    if not is_usable():
        return ()
    best: int = ctypes.PyDLL(str(PATH)).penstock_best_isa()
    return ISAS[: best + 1]


def chosen_isa() -> str | None:
    """The best that this CPU runs, or what ``PENSTOCK_ISA`` caps it to; None without a usable library.

    Raises:
        ConfigError: ``PENSTOCK_ISA`` names no instruction set.
    """
    cap = os.environ.get("PENSTOCK_ISA") or ISAS[-1]
    if cap not in ISAS:
        raise ConfigError("PENSTOCK_ISA", f"unknown instruction set {cap!r}: use one of {', '.join(ISAS)}")
    available = available_isas()
    return available[min(len(available) - 1, ISAS.index(cap))] if available else None


def cpu_features() -> list[str]:
    """What this CPU has of the features that the kernels can use."""
    if not is_usable():
        return []
    describe = ctypes.PyDLL(str(PATH)).penstock_cpu_features
    describe.restype = ctypes.c_char_p
    names: bytes = describe()
    return names.decode().split()


def _function(library: ctypes.CDLL, name: str, isa: str) -> Kernel:
    function = library[f"penstock_{name}_{isa}"]
    # One argument, packed here: ctypes takes 1.1 us to convert eleven, this 0.25 us.
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_int64 if name == "take_rows" else None
    pack = struct.Struct(_ARGUMENTS[name]).pack
    return lambda *arguments: function(pack(*arguments))
