"""The table of operations: its rows are the methods of `penstock.kernels.ops.Ops` marked with `operation`.

A row holds the name, the signature, the properties for recording, and the C functions that compute the
operation on a CPU. `collect_operations` returns the rows of a class. Three components use the table:
`Ops.implementations` returns the back end of each operation, `penstock.kernels.recording` generates the
recorder from it, and `penstock.kernels.cpu.library` declares its C functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., object])

Arguments = dict[str, Any]
"""The arguments of a call, by parameter name."""


class UnrecordableStepError(Exception):
    """A step cannot be recorded or captured, and must run eagerly."""


@dataclass(frozen=True, slots=True)
class CFunction:
    """A function of the C++ kernels that takes one struct of arguments.

    The function ``name`` is exported once per instruction set, as ``penstock_<name>_<isa>``.
    """

    arguments: str
    """Types of the fields of the C++ struct (csrc), in order and in the notation of Python's `struct`: q
    int64, P pointer (0 for none), d double."""
    can_be_long: bool = False
    """Whether `Kernels` also has ``long_<name>``: the same function, but the call releases the GIL. It is for
    large inputs and for functions that wait for other ranks."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the table."""

    name: str
    signature: inspect.Signature
    weights: frozenset[str]
    """Names of the parameters whose tensors are the same in all steps."""
    is_recordable: bool
    """Whether a step that calls the operation can be recorded."""
    simplify: Callable[[Arguments], Arguments] | None
    """Returns the arguments to use while a step is recorded: for the record and for running the operation.
    Raises `UnrecordableStepError` if the step cannot be recorded. None keeps all arguments.
    """
    functions: Mapping[str, CFunction]
    """The C functions of the operation by name.

    A function that several operations call is in one row only.
    """

    def bind(self, *args: object, **kwargs: object) -> Arguments:
        """Return the arguments of a call by parameter name, including defaults."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


def operation(
    *,
    weights: Collection[str] = (),
    is_recordable: bool = True,
    simplify: Callable[[Arguments], Arguments] | None = None,
    functions: Mapping[str, CFunction] | None = None,
) -> Callable[[_Method], _Method]:
    """Return a decorator that marks a method as an operation. The arguments are fields of its `Operation`.

    Overriding methods need no mark.
    """

    def mark(method: _Method) -> _Method:
        signature = inspect.signature(method)
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])  # without self
        unknown = set(weights) - set(signature.parameters)
        assert not unknown, f"{method.__name__} has no parameters {unknown}"
        row = Operation(
            method.__name__, signature, frozenset(weights), is_recordable, simplify, dict(functions or {})
        )
        setattr(method, _MARK, row)
        return method

    return mark


_MARK = "_penstock_operation"
"""Name of the attribute of a marked method that holds its `Operation`."""


@cache
def collect_operations(cls: type) -> Mapping[str, Operation]:
    """Return the operations of a class by name, in the order of their definition, base classes first."""
    operations: dict[str, Operation] = {}
    for base in reversed(cls.__mro__):
        for value in vars(base).values():
            row = getattr(value, _MARK, None)
            if isinstance(row, Operation):
                operations[row.name] = row
    return operations
