"""The shared library of C++ kernels: locating it, choosing the instruction set, and calling it."""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch  # noqa: F401  # first: the library uses torch's copy of libgomp.so.1

from penstock.errors import ConfigError
from penstock.host import heartbeat
from penstock.kernels.operations import CFunction
from penstock.kernels.ops import OPERATIONS

_LOG = logging.getLogger(__name__)

ISAS = ("generic", "avx2", "avx512_vnni", "avx512")
"""The instruction sets that the library has kernels for, ascending."""

PATH = Path(__file__).with_name("libpenstock_cpu.so")

ABI = 21
"""Version of the argument structs and the panels. ``penstock_abi`` in csrc/host.cpp returns the version of a
library."""

Kernel = Callable[..., int]
"""A C function. Returns -1, or the index of a bad value, such as a token outside its table."""

FUNCTIONS: Mapping[str, CFunction] = {
    "pack": CFunction("2q P q 4P 2q"),  # packs weights; not part of a step
    "pack_codes": CFunction("q P q 5P 2q"),
    "from_rank_0": CFunction("P q P q", can_be_long=True),  # copies sampled tokens in a `CompiledLoop`
    **{name: function for row in OPERATIONS.values() for name, function in row.functions.items()},
}
"""The C functions by name: the functions of the table of operations, and the functions listed above."""


class Kernels:
    """The C functions of one instruction set, as attributes.

    Their arguments are the fields of the structs in csrc, in order. ``long_<name>`` releases the GIL while it
    runs. Acquiring the GIL again takes 100 us if another Python thread is busy, so short calls keep it.

    Args:
        isa: the instruction set.
        functions: name of an attribute -> function.
    """

    def __init__(self, isa: str, functions: Mapping[str, Kernel]) -> None:
        self.isa = isa
        vars(self).update(functions)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Kernel: ...


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A kernel call that is recorded to run later."""

    name: str
    arguments: bytes


@cache
def open_kernels(isa: str) -> Kernels:
    """Return the kernels compiled for ``isa``; the library must exist."""
    keeping_gil, releasing_gil = ctypes.PyDLL(str(PATH)), ctypes.CDLL(str(PATH))
    functions = {name: _function(keeping_gil, name, isa) for name in FUNCTIONS}
    for name, function in FUNCTIONS.items():
        if function.can_be_long:
            functions[f"long_{name}"] = _function(releasing_gil, name, isa)
    _count_progress(keeping_gil)
    return Kernels(isa, functions)


def capturing_kernels(isa: str, captured: list[CapturedCall]) -> Kernels:
    """Return kernels that append their calls to ``captured`` instead of computing."""

    def capture(name: str) -> Kernel:
        pack = struct.Struct(FUNCTIONS[name].arguments).pack

        def kernel(*arguments: object) -> int:
            captured.append(CapturedCall(name, pack(*arguments)))
            return -1

        return kernel

    functions = {name: capture(name) for name in FUNCTIONS}
    long_functions = {
        f"long_{name}": functions[name] for name, function in FUNCTIONS.items() if function.can_be_long
    }
    return Kernels(isa, functions | long_functions)


class CoreContention(ctypes.Structure):
    """The use of the cores by other processes in recent steps; ``CoreContention`` in csrc/plan.inl."""

    _fields_ = (("alone_until", ctypes.c_int64), ("pause", ctypes.c_int64))


class CompiledSteps:
    """Captured calls that run in order as one call, in one parallel region.

    Args:
        isa: the instruction set of the kernels.
        captured: the calls; the memory that they point to must outlive this object.
        releases_gil: whether to release the GIL while the calls run.
        contention: shared by all compiled steps of a session, see csrc/plan.inl.
    """

    def __init__(
        self, isa: str, captured: Sequence[CapturedCall], *, releases_gil: bool, contention: CoreContention
    ) -> None:
        self._table = _CallTable(isa, captured)
        library = (ctypes.CDLL if releases_gil else ctypes.PyDLL)(str(PATH))
        self._function = library[f"penstock_run_plan_{isa}"]
        self._function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._function.restype = ctypes.c_int64
        self._contention = contention
        self._arguments = (self._table.address, len(captured), ctypes.addressof(contention))

    def __len__(self) -> int:
        return len(self._table.names)

    def __call__(self) -> str | None:
        """Run all calls. Return the name of the first kernel with a bad argument, or None."""
        failed_call = self._function(*self._arguments)
        return None if failed_call < 0 else self._table.names[failed_call]


class CompiledLoop:
    """Captured calls that run repeatedly within one C call, which releases the GIL.

    The last captured call samples one token per row. It writes the tokens to the memory from which the first
    call reads them.

    Args:
        isa: the instruction set of the kernels.
        captured: the calls; the memory that they point to must outlive this object.
        tokens: address of the sampled tokens, ``[rows]`` int64.
        rows: number of rows.
        contention: shared by all compiled steps of a session, see csrc/plan.inl.
    """

    def __init__(
        self,
        isa: str,
        captured: Sequence[CapturedCall],
        *,
        tokens: int,
        rows: int,
        contention: CoreContention,
    ) -> None:
        self._table = _CallTable(isa, captured)
        self._function = ctypes.CDLL(str(PATH))[f"penstock_run_loop_{isa}"]
        self._function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._function.restype = ctypes.c_int64
        self._contention = contention
        self._loop = _LoopArguments(
            operations=self._table.address, count=len(captured), rows=rows, tokens=tokens
        )

    def __call__(
        self,
        step_inputs: Sequence[tuple[int, int, int]],
        stop_tokens: tuple[int, int],
        sampled_tokens: int,
        num_steps: int,
    ) -> tuple[int, str | None]:
        """Run the calls once per step.

        Args:
            step_inputs: destination address, source address and bytes per step of each input that differs
                between steps.
            stop_tokens: address of the stop tokens of each row, ``[rows, n]`` int64, and n.
            sampled_tokens: address to which the sampled tokens ``[num_steps, rows]`` int64 are written.
            num_steps: maximum number of steps. Fewer run if every row has ended.

        Returns:
            The number of steps that ran, and the name of the first kernel with a bad argument or None.
        """
        arguments = self._loop
        table = (_StepInput * len(step_inputs))(*(_StepInput(*step_input) for step_input in step_inputs))
        arguments.step_inputs, arguments.num_step_inputs = ctypes.addressof(table), len(step_inputs)
        arguments.stop_tokens, arguments.num_stop_tokens = stop_tokens
        arguments.sampled_tokens, arguments.num_steps = sampled_tokens, num_steps
        failed_call = self._function(ctypes.addressof(arguments), ctypes.addressof(self._contention))
        return arguments.steps_run, None if failed_call < 0 else self._table.names[failed_call]


class _StepInput(ctypes.Structure):
    """``StepInput`` in csrc/plan.inl."""

    _fields_ = (("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("num_bytes", ctypes.c_int64))


class _LoopArguments(ctypes.Structure):
    """``LoopArguments`` in csrc/plan.inl."""

    _fields_ = (
        ("operations", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("step_inputs", ctypes.c_void_p),
        ("num_step_inputs", ctypes.c_int64),
        ("num_steps", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("stop_tokens", ctypes.c_void_p),
        ("num_stop_tokens", ctypes.c_int64),
        ("sampled_tokens", ctypes.c_void_p),
        ("steps_run", ctypes.c_int64),
    )


class _CallTable:
    """Captured calls as an array of ``PlanOperation`` (csrc/plan.inl), which the library reads."""

    def __init__(self, isa: str, captured: Sequence[CapturedCall]) -> None:
        library = ctypes.PyDLL(str(PATH))
        self.names = [call.name for call in captured]
        packed = b"".join(call.arguments for call in captured)
        self._arguments = ctypes.create_string_buffer(packed, len(packed))
        addresses, address = [], ctypes.addressof(self._arguments)
        for call in captured:
            addresses.append(address)
            address += len(call.arguments)
        operations = {
            name: ctypes.addressof(ctypes.c_char.in_dll(library, f"penstock_{name}_operation_{isa}"))
            for name in set(self.names)
        }
        pointers = [
            pointer
            for name, arguments in zip(self.names, addresses, strict=True)
            for pointer in (operations[name], arguments)
        ]
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.address = ctypes.addressof(self._pointers)


def _count_progress(library: ctypes.CDLL) -> None:
    """Make the kernels count completed work in the progress counter of this process.

    The supervisor of a worker reads this counter to detect hangs.
    """
    try:
        function = library.penstock_count_progress_in
    except AttributeError:
        _LOG.warning(
            "%s is older than this package: rebuild it, or a long kernel may be mistaken for a hang",
            PATH.name,
        )
        return
    function.argtypes, function.restype = [ctypes.c_void_p], None
    function(heartbeat.counter_address())


def is_usable() -> bool:
    """Return whether the library exists and has the ABI of this module."""
    if not PATH.exists():
        return False
    try:
        return bool(ctypes.PyDLL(str(PATH)).penstock_abi() == ABI)
    except (OSError, AttributeError):  # built for a different machine, or older than the ABI number
        return False


def available_isas() -> tuple[str, ...]:
    """Return the instruction sets that this CPU runs, ascending; empty without a usable library."""
    if not is_usable():
        return ()
    best: int = ctypes.PyDLL(str(PATH)).penstock_best_isa()
    return ISAS[: best + 1]


def chosen_isa() -> str | None:
    """Return the best instruction set of this CPU, capped by ``PENSTOCK_ISA``; None without a usable library.

    Raises:
        ConfigError: ``PENSTOCK_ISA`` names no instruction set.
    """
    cap = os.environ.get("PENSTOCK_ISA") or ISAS[-1]
    if cap not in ISAS:
        raise ConfigError("PENSTOCK_ISA", f"unknown instruction set {cap!r}: use one of {', '.join(ISAS)}")
    available = available_isas()
    return available[min(len(available) - 1, ISAS.index(cap))] if available else None


def cpu_features() -> list[str]:
    """Return the features of this CPU that the kernels can use; empty without a usable library."""
    if not is_usable():
        return []
    describe = ctypes.PyDLL(str(PATH)).penstock_cpu_features
    describe.restype = ctypes.c_char_p
    names: bytes = describe()
    return names.decode().split()


def _function(library: ctypes.CDLL, name: str, isa: str) -> Kernel:
    function = library[f"penstock_{name}_{isa}"]
    # The arguments are packed into bytes: ctypes takes 1.1 us to convert 11 arguments, packing takes 0.25 us.
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_int64
    pack = struct.Struct(FUNCTIONS[name].arguments).pack
    return lambda *arguments: function(pack(*arguments))
