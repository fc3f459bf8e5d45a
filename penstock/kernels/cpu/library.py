"""The shared library of kernels: finding it, and choosing the instruction set."""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  # first: the library shares the copy of libgomp.so.1 that torch brings

from penstock.errors import ConfigError
from penstock.host import heartbeat
from penstock.kernels.operations import CFunction
from penstock.kernels.ops import OPERATIONS

_LOG = logging.getLogger(__name__)

ISAS = ("generic", "avx2", "avx512_vnni", "avx512")
"""The instruction sets there are kernels for, ascending."""

PATH = Path(__file__).with_name("libpenstock_cpu.so")

ABI = 10
"""The layout of the kernels' arguments; ``penstock_abi`` in csrc/host.cpp says which one a library has."""

Kernel = Callable[..., int]
"""Returns -1, or the index of a bad argument."""

FUNCTIONS: Mapping[str, CFunction] = {
    "pack": CFunction("2q P q 4P 2q"),  # no operation: packs weights
    **{name: one for row in OPERATIONS.values() for name, one in row.functions.items()},
}
"""The C functions by name: those of the table of operations, and those that pack weights."""


class Kernels:
    """The C functions of one instruction set, as attributes that take pointers and numbers in csrc's order.

    ``long_<name>`` releases the GIL while it runs. Taking the GIL back beside a busy thread costs 100 us, so
    short calls keep it.

    Args:
        isa: the instruction set.
        functions: the attributes.
    """

    def __init__(self, isa: str, functions: Mapping[str, Kernel]) -> None:
        self.isa = isa
        vars(self).update(functions)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Kernel: ...


@dataclass(frozen=True, slots=True)
class Capture:
    """A call of a kernel that was not made."""

    name: str
    arguments: bytes


@cache
def open_kernels(isa: str) -> Kernels:
    """The kernels compiled for ``isa``; the library must be there."""
    held, released = ctypes.PyDLL(str(PATH)), ctypes.CDLL(str(PATH))
    functions = {name: _function(held, name, isa) for name in FUNCTIONS}
    for name, function in FUNCTIONS.items():
        if function.can_be_long:
            functions[f"long_{name}"] = _function(released, name, isa)
    _count_progress(held)
    return Kernels(isa, functions)


def capturing_kernels(isa: str, captured: list[Capture]) -> Kernels:
    """Kernels that compute nothing: they append what they were called with."""

    def capture(name: str) -> Kernel:
        pack = struct.Struct(FUNCTIONS[name].arguments).pack

        def kernel(*arguments: Any) -> int:
            captured.append(Capture(name, pack(*arguments)))
            return -1

        return kernel

    functions = {name: capture(name) for name in FUNCTIONS}
    long = {f"long_{name}": functions[name] for name, one in FUNCTIONS.items() if one.can_be_long}
    return Kernels(isa, functions | long)


class Neighbours(ctypes.Structure):
    """What steps have seen of other processes that use the cores: ``Neighbours`` in csrc/plan.inl."""

    _fields_ = (("alone_until", ctypes.c_int64), ("pause", ctypes.c_int64))


class CompiledSteps:
    """Captured calls that run in their order as one call: one parallel region of the threads.

    Args:
        isa: the instruction set of the kernels.
        captured: the calls; what their pointers point to must outlive this.
        long: release the GIL while they run.
        neighbours: of the session, see csrc/plan.inl.
    """

    def __init__(self, isa: str, captured: Sequence[Capture], *, long: bool, neighbours: Neighbours) -> None:
        self._laid = _CallTable(isa, captured)
        library = (ctypes.CDLL if long else ctypes.PyDLL)(str(PATH))
        self._function = library[f"penstock_run_plan_{isa}"]
        self._function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._function.restype = ctypes.c_int64
        self._neighbours = neighbours
        self._where = (self._laid.address, len(captured), ctypes.addressof(neighbours))

    def __len__(self) -> int:
        return len(self._laid.names)

    def __call__(self) -> str | None:
        """Runs them all; the name of the first kernel with a bad argument, None where all was well."""
        failed = self._function(*self._where)
        return None if failed < 0 else self._laid.names[failed]


class CompiledLoop:
    """Captured calls that run several times in a row as one call, which releases the GIL.

    The last of them samples a token for each row, to where the first read them in the next round.

    Args:
        isa: the instruction set of the kernels.
        captured: the calls; what their pointers point to must outlive this.
        tokens: where the last puts its tokens, ``rows`` int64.
        rows: how many tokens that are.
        neighbours: of the session, see csrc/plan.inl.
    """

    def __init__(
        self, isa: str, captured: Sequence[Capture], *, tokens: int, rows: int, neighbours: Neighbours
    ) -> None:
        self._laid = _CallTable(isa, captured)
        self._function = ctypes.CDLL(str(PATH))[f"penstock_run_loop_{isa}"]
        self._function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._function.restype = ctypes.c_int64
        self._neighbours = neighbours
        self._rounds = _LoopArguments(steps=self._laid.address, count=len(captured), rows=rows, tokens=tokens)

    def __call__(
        self, varied: Sequence[tuple[int, int, int]], ends: tuple[int, int], sampled: int, rounds: int
    ) -> tuple[int, str | None]:
        """How many rounds were run, and the first kernel with a bad argument, None where all was well.

        Args:
            varied: what differs from round to round: where to, where from, and bytes of a round.
            ends: ``[rows, n]`` int64: tokens after which a row needs no other, and n.
            sampled: ``[rounds, rows]`` int64, to be written.
            rounds: how many to run; fewer where each row has sampled an end of its own.
        """
        given = self._rounds
        table = (_VaryingArgument * len(varied))(*(_VaryingArgument(*one) for one in varied))
        given.varied, given.num_varied, given.rounds = ctypes.addressof(table), len(varied), rounds
        (given.ends, given.num_ends), given.sampled = ends, sampled
        failed = self._function(ctypes.addressof(given), ctypes.addressof(self._neighbours))
        return given.done, None if failed < 0 else self._laid.names[failed]


class _VaryingArgument(ctypes.Structure):
    """``VaryingArgument`` in csrc/plan.inl."""

    _fields_ = (("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("num_bytes", ctypes.c_int64))


class _LoopArguments(ctypes.Structure):
    """``LoopArguments`` in csrc/plan.inl."""

    _fields_ = (
        ("steps", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("varied", ctypes.c_void_p),
        ("num_varied", ctypes.c_int64),
        ("rounds", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("num_ends", ctypes.c_int64),
        ("sampled", ctypes.c_void_p),
        ("done", ctypes.c_int64),
    )


class _CallTable:
    """Captured calls in memory, as the library reads them: ``Step`` in csrc/plan.inl."""

    def __init__(self, isa: str, captured: Sequence[Capture]) -> None:
        library = ctypes.PyDLL(str(PATH))
        self.names = [one.name for one in captured]
        packed = b"".join(one.arguments for one in captured)
        self._arguments = ctypes.create_string_buffer(packed, len(packed))
        places, place = [], ctypes.addressof(self._arguments)
        for one in captured:
            places.append(place)
            place += len(one.arguments)
        operations = {
            name: ctypes.addressof(ctypes.c_char.in_dll(library, f"penstock_{name}_operation_{isa}"))
            for name in set(self.names)
        }
        steps = [
            number for name, at in zip(self.names, places, strict=True) for number in (operations[name], at)
        ]
        self._steps = (ctypes.c_void_p * len(steps))(*steps)
        self.address = ctypes.addressof(self._steps)


def _count_progress(library: ctypes.CDLL) -> None:
    """Has the kernels count the pieces of their work as the progress of this process."""
    try:
        function = library.penstock_count_progress_in
    except AttributeError:
        _LOG.warning(
            "%s is older than this package: build it again, or long kernels may be taken for a hang",
            PATH.name,
        )
        return
    function.argtypes, function.restype = [ctypes.c_void_p], None
    function(heartbeat.counter_address())


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
    function.restype = ctypes.c_int64
    pack = struct.Struct(FUNCTIONS[name].arguments).pack
    return lambda *arguments: function(pack(*arguments))
