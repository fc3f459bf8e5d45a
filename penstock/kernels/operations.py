"""The table of operations: its rows are the methods of `penstock.kernels.ops.Ops` marked with `operation`.

A row holds the name, the signature, the properties for recording, and the C functions that compute the
operation on a CPU. `operations_of` collects the rows of a class. The names that ``penstock env`` lists, the
recorder (`penstock.kernels.recording`) and the declarations of the C functions
(`penstock.kernels.cpu.library`) all follow from it.
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
    """A step cannot be recorded and must run eagerly."""


@dataclass(frozen=True, slots=True)
class CFunction:
    """A function of the C++ kernels that takes one struct of arguments.

    The function ``name`` is exported once per instruction set, as ``penstock_<name>_<isa>``.
    """

    arguments: str
    """The fields in the order of csrc, in `struct` notation: q int64, P pointer (0 for none), d double."""
    can_be_long: bool = False
    """Whether large inputs justify a call that releases the GIL, ``long_<name>``."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the table."""

    name: str
    signature: inspect.Signature
    weights: frozenset[str]
    """Parameters whose tensors stay the same from step to step."""
    is_recordable: bool
    simplify: Callable[[Arguments], Arguments] | None
    """Applied to the arguments before they are recorded; may raise `UnrecordableStepError`."""
    functions: Mapping[str, CFunction]
    """Name -> C function. A function that several operations call is listed in one row only."""

    def bind(self, *args: object, **kwargs: object) -> Arguments:
        """Return the arguments of a call by parameter name, with defaults."""
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
    """Mark a method as an operation; the arguments are fields of `Operation`.

    Overriding methods need no mark.
    """

    def mark(method: _Method) -> _Method:
        signature = inspect.signature(method)
        own = signature.replace(parameters=list(signature.parameters.values())[1:])  # without self
        unknown = set(weights) - set(own.parameters)
        assert not unknown, f"{method.__name__} has no parameters {unknown}"
        row = Operation(
            method.__name__, own, frozenset(weights), is_recordable, simplify, dict(functions or {})
        )
        setattr(method, _MARK, row)
        return method

    return mark


_MARK = "_penstock_operation"


@cache
def operations_of(cls: type) -> Mapping[str, Operation]:
    """Return the operations of a class by name, in the order of their definition, base classes first."""
    found: dict[str, Operation] = {}
    for base in reversed(cls.__mro__):
        for value in vars(base).values():
            row = getattr(value, _MARK, None)
            if isinstance(row, Operation):
                found[row.name] = row
    return found
