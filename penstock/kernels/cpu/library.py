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
"""The instruction sets for which the library has kernels. A CPU that supports one supports all before it."""

PATH = Path(__file__).with_name("libpenstock_cpu.so")
"""The shared library."""

ABI = 23
"""The version of the argument structs and panel layouts that this module requires of the library.

``penstock_abi`` in csrc/host.cpp returns the version of the library.
"""

Kernel = Callable[..., int]
"""A C function.

Returns -1, or the index of an invalid value, such as a token id outside the embedding table. A collective
returns 0 if it waits for another rank in vain.
"""

FUNCTIONS: Mapping[str, CFunction] = {
    "pack": CFunction("2q P q 4P 2q"),  # packs weights; not part of a step
    "pack_codes": CFunction("q P q 5P 2q"),
    "from_rank_0": CFunction("P q P q", can_be_long=True),  # copies sampled tokens in a `CompiledLoop`
    **{name: function for operation in OPERATIONS.values() for name, function in operation.functions.items()},
}
"""The C functions by name: the functions of `OPERATIONS`, and those above that belong to no operation."""


class Kernels:
    """The C functions of one instruction set, as attributes.

    The arguments of a function are the fields of its struct in csrc, in order. ``long_<name>`` releases the
    GIL while it runs. If another Python thread is busy, acquiring the GIL again may take one switch interval,
    by default 5 ms, so short calls keep it.

    Args:
        isa: the instruction set.
        functions: the C functions by attribute name.
    """

    def __init__(self, isa: str, functions: Mapping[str, Kernel]) -> None:
        self.isa = isa
        vars(self).update(functions)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Kernel: ...


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A kernel call that was captured instead of run; ``arguments`` are the bytes of its struct in csrc."""

    name: str
    arguments: bytes


@cache
def open_kernels(isa: str) -> Kernels:
    """Return the kernels compiled for ``isa``, which count their progress. The library must be usable."""
    gil_keeping_library, gil_releasing_library = ctypes.PyDLL(str(PATH)), ctypes.CDLL(str(PATH))
    functions = {name: _load_function(gil_keeping_library, name, isa) for name in FUNCTIONS}
    for name, function in FUNCTIONS.items():
        if function.can_be_long:
            functions[f"long_{name}"] = _load_function(gil_releasing_library, name, isa)
    _count_progress(gil_keeping_library)
    return Kernels(isa, functions)


def capturing_kernels(isa: str, captured: list[CapturedCall]) -> Kernels:
    """Return kernels that append their calls to ``captured`` instead of running."""

    def make_capturing_kernel(name: str) -> Kernel:
        pack = struct.Struct(FUNCTIONS[name].arguments).pack

        def kernel(*arguments: object) -> int:
            captured.append(CapturedCall(name, pack(*arguments)))
            return -1

        return kernel

    functions = {name: make_capturing_kernel(name) for name in FUNCTIONS}
    long_functions = {
        f"long_{name}": functions[name] for name, function in FUNCTIONS.items() if function.can_be_long
    }
    return Kernels(isa, functions | long_functions)


class CoreContention(ctypes.Structure):
    """The state of ``CoreContention`` in csrc/plan.inl: how long compiled steps run on a single thread."""

    _fields_ = (("alone_until", ctypes.c_int64), ("last_alone_period", ctypes.c_int64))


class CompiledSteps:
    """Captured kernel calls that run in order in one library call, with one parallel region.

    Args:
        isa: the instruction set of the kernels.
        captured: the kernel calls. The memory that they point to must outlive this object.
        releases_gil: whether the library call releases the GIL.
        contention: read and updated by each library call, see csrc/plan.inl.
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
        """Run all kernel calls. Return the name of the first kernel that failed, or None.

        A kernel fails if it gets an invalid value, or if it waits for another rank in vain.
        """
        failed_index = self._function(*self._arguments)
        return None if failed_index < 0 else self._table.names[failed_index]


class CompiledLoop:
    """The captured kernel calls of one step, repeated for several steps in one library call.

    The library call releases the GIL. The last kernel of a step writes one sampled token per row to
    ``tokens_address``, from which the first kernel of the next step reads them.

    Args:
        isa: the instruction set of the kernels.
        captured: the kernel calls of a step. The memory that they point to must outlive this object.
        tokens_address: address of the sampled tokens, ``[rows]`` int64.
        rows: number of rows.
        contention: read and updated by each library call, see csrc/plan.inl.
    """

    def __init__(
        self,
        isa: str,
        captured: Sequence[CapturedCall],
        *,
        tokens_address: int,
        rows: int,
        contention: CoreContention,
    ) -> None:
        self._table = _CallTable(isa, captured)
        self._function = ctypes.CDLL(str(PATH))[f"penstock_run_loop_{isa}"]
        self._function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._function.restype = ctypes.c_int64
        self._contention = contention
        self._loop = _LoopArguments(
            operations=self._table.address, num_operations=len(captured), rows=rows, tokens=tokens_address
        )

    def __call__(
        self,
        step_inputs: Sequence[tuple[int, int, int]],
        stop_tokens: tuple[int, int],
        sampled_tokens_address: int,
        num_steps: int,
    ) -> tuple[int, str | None]:
        """Run up to ``num_steps`` steps.

        Args:
            step_inputs: for each input that differs between steps: destination address, source address, and
                bytes per step.
            stop_tokens: address of the stop tokens ``[rows, n]`` int64, padded with -1, and n.
            sampled_tokens_address: address to which the sampled tokens ``[num_steps, rows]`` int64 are
                written.
            num_steps: maximum number of steps. The loop ends early once every row has sampled a stop token,
                or after a step in which a kernel failed.

        Returns:
            The number of steps that ran, and the name of the first kernel that failed, or None.
        """
        loop = self._loop
        input_table = (_StepInput * len(step_inputs))(
            *(_StepInput(*step_input) for step_input in step_inputs)
        )
        loop.step_inputs, loop.num_step_inputs = ctypes.addressof(input_table), len(step_inputs)
        loop.stop_tokens, loop.num_stop_tokens = stop_tokens
        loop.sampled_tokens, loop.num_steps = sampled_tokens_address, num_steps
        failed_index = self._function(ctypes.addressof(loop), ctypes.addressof(self._contention))
        return loop.num_steps_run, None if failed_index < 0 else self._table.names[failed_index]


class _StepInput(ctypes.Structure):
    """``StepInput`` in csrc/plan.inl."""

    _fields_ = (("destination", ctypes.c_void_p), ("source", ctypes.c_void_p), ("num_bytes", ctypes.c_int64))


class _LoopArguments(ctypes.Structure):
    """``LoopArguments`` in csrc/plan.inl."""

    _fields_ = (
        ("operations", ctypes.c_void_p),
        ("num_operations", ctypes.c_int64),
        ("step_inputs", ctypes.c_void_p),
        ("num_step_inputs", ctypes.c_int64),
        ("num_steps", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("stop_tokens", ctypes.c_void_p),
        ("num_stop_tokens", ctypes.c_int64),
        ("sampled_tokens", ctypes.c_void_p),
        ("num_steps_run", ctypes.c_int64),
    )


class _CallTable:
    """Captured kernel calls as an array of ``PlanOperation`` (csrc/plan.inl)."""

    def __init__(self, isa: str, captured: Sequence[CapturedCall]) -> None:
        library = ctypes.PyDLL(str(PATH))
        self.names = [call.name for call in captured]
        packed = b"".join(call.arguments for call in captured)
        self._arguments = ctypes.create_string_buffer(packed, len(packed))
        argument_addresses, address = [], ctypes.addressof(self._arguments)
        for call in captured:
            argument_addresses.append(address)
            address += len(call.arguments)
        operations = {
            name: ctypes.addressof(ctypes.c_char.in_dll(library, f"penstock_{name}_operation_{isa}"))
            for name in set(self.names)
        }
        pointers = [
            pointer
            for name, arguments in zip(self.names, argument_addresses, strict=True)
            for pointer in (operations[name], arguments)
        ]
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.address = ctypes.addressof(self._pointers)


def _count_progress(library: ctypes.CDLL) -> None:
    """Make the kernels count completed work in the progress counter of this process.

    The supervisor process of a worker reads the counter to detect hangs.
    """
    try:
        function = library.penstock_count_progress_in
    except AttributeError:
        _LOG.warning(
            "%s is older than this package: rebuild it, or a supervisor may take a long kernel for a hang",
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
    except (OSError, AttributeError):  # built for a different machine, or before ``penstock_abi`` existed
        return False


def available_isas() -> tuple[str, ...]:
    """Return those of `ISAS` that this CPU supports, in this order; empty without a usable library."""
    if not is_usable():
        return ()
    best_index: int = ctypes.PyDLL(str(PATH)).penstock_best_isa()
    return ISAS[: best_index + 1]


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
    cpu_features_function = ctypes.PyDLL(str(PATH)).penstock_cpu_features
    cpu_features_function.restype = ctypes.c_char_p
    names: bytes = cpu_features_function()
    return names.decode().split()


def _load_function(library: ctypes.CDLL, name: str, isa: str) -> Kernel:
    """Return a C function of the library that takes the fields of its struct as Python arguments."""
    function = library[f"penstock_{name}_{isa}"]
    # The arguments are packed into bytes: ctypes takes 1.1 us to convert 11 arguments, packing takes 0.25 us.
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_int64
    pack = struct.Struct(FUNCTIONS[name].arguments).pack
    return lambda *arguments: function(pack(*arguments))
