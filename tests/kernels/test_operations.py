"""The table of operations, the recorder, and the declarations of C functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import OPERATIONS, Ops
from penstock.kernels.cpu.library import FUNCTIONS, Kernels
from penstock.kernels.operations import (
    Arguments,
    CFunction,
    UnrecordableStepError,
    collect_operations,
    operation,
)
from penstock.kernels.recording import record
from penstock.kernels.reference import ReferenceOps


def refuse_negative(arguments: Arguments) -> Arguments:
    if arguments["factor"] < 0:
        raise UnrecordableStepError("a negative factor")
    return arguments


class ExtendedOps(ReferenceOps):
    """The reference with two further operations."""

    name = "more"

    @operation(
        weights=["weight"],
        simplify=refuse_negative,
        functions={"blend": CFunction("3P q d", can_be_long=True)},
    )
    def blend(self, x: Tensor, weight: Tensor, *, factor: float = 2.0) -> Tensor:
        """Return ``x * factor + weight``."""
        return x * factor + weight

    @operation(is_recordable=False)
    def shuffle(self, x: Tensor) -> Tensor:
        """Return the rows in random order."""
        return x[torch.randperm(len(x))]


class AcceleratedOps(ExtendedOps):
    name = "faster"

    def blend(self, x: Tensor, weight: Tensor, *, factor: float = 2.0) -> Tensor:
        return torch.add(weight, x, alpha=factor)


def test_the_table_contains_added_operations() -> None:
    assert [*collect_operations(ExtendedOps)] == [*OPERATIONS, "blend", "shuffle"]
    row = collect_operations(ExtendedOps)["blend"]
    assert list(row.signature.parameters) == ["x", "weight", "factor"]
    assert row.functions["blend"].can_be_long
    assert "blend" not in OPERATIONS
    assert ExtendedOps().implementations()["blend"] == "more"
    assert ExtendedOps().implementations()["rms_norm"] == "reference"
    assert AcceleratedOps().implementations()["blend"] == "faster"
    assert AcceleratedOps().implementations()["shuffle"] == "more"


@pytest.mark.parametrize("ops", [ExtendedOps(), AcceleratedOps()], ids=lambda ops: ops.name)
def test_the_recorder_records_added_operations(ops: ExtendedOps) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)

    def step(recording: Ops) -> list[Tensor]:
        assert hasattr(recording, "blend")
        return [recording.blend(recording.scale(x, 3.0), weight, factor=0.5)]

    plan = record(ops, {"x": x}, step)
    assert [record.operation for record in plan.records] == ["scale", "blend"]
    assert plan.records[1].arguments["factor"] == 0.5
    assert [weight.data_ptr() for weight in plan.weights] == [weight.data_ptr()]
    other_x = torch.randn(3, 8)
    (replayed_result,) = plan.replay(ops, {"x": other_x})
    torch.testing.assert_close(replayed_result, other_x * 1.5 + weight)


def test_defaults_are_recorded() -> None:
    x = torch.randn(3, 8)
    plan = record(ExtendedOps(), {"x": x}, lambda ops: [ops.blend(x, torch.zeros(8))])  # type: ignore[attr-defined]
    assert plan.records[0].arguments["factor"] == 2.0


def test_unrecordable_operations_and_arguments_are_refused() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(UnrecordableStepError, match=r"^shuffle cannot be recorded$"):
        record(ExtendedOps(), {"x": x}, lambda ops: [ops.shuffle(x)])  # type: ignore[attr-defined]
    with pytest.raises(UnrecordableStepError, match=r"^a negative factor$"):
        record(ExtendedOps(), {"x": x}, lambda ops: [ops.blend(x, x[0], factor=-1.0)])  # type: ignore[attr-defined]


def test_a_weight_missing_from_the_signature_is_refused() -> None:
    with pytest.raises(AssertionError, match="no parameters"):

        @operation(weights=["wieght"])
        def blend(_self: Ops, x: Tensor, _weight: Tensor) -> Tensor:
            return x


def test_all_c_declarations_but_three_come_from_the_table() -> None:
    declared_functions = {
        name: function for row in OPERATIONS.values() for name, function in row.functions.items()
    }
    assert {"pack", "pack_codes", "from_rank_0", *declared_functions} == set(FUNCTIONS)
    assert sum(len(row.functions) for row in OPERATIONS.values()) == len(declared_functions), (
        "a C function is declared twice"
    )


def test_loaded_kernels_are_attributes_and_names_without_a_kernel_raise() -> None:
    kernels = Kernels("none", {"blend": lambda *numbers: len(numbers), "long_blend": lambda: 0})
    assert kernels.blend(1, 2) == 2
    with pytest.raises(AttributeError):
        kernels.linear(1)
