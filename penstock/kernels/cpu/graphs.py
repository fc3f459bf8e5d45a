"""`CpuGraphCompiler`: records steps and compiles them for the C++ kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from penstock.kernels.cpu.library import CoreContention, capturing_kernels
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.plan import CompiledPlan
from penstock.kernels.graph import GraphCompiler, Step
from penstock.kernels.operations import UnrecordableStepError
from penstock.kernels.ops import Ops
from penstock.kernels.recording import ALIGNMENT, record

_MAX_OVERSIZED_ARENA_BYTES = 16 << 20
"""Maximum bytes of an arena that is larger than required.

An arena has twice the required bytes, so that it rarely grows, but at most this number of bytes, or the
required bytes if they are more.
"""


class CpuGraphCompiler(GraphCompiler):
    """Records steps and compiles the recordings.

    Graphs share an arena, because steps never run concurrently. Recording runs no kernels. The results of
    `capture` are those of a first replay.

    Args:
        ops: the operations whose kernels the graphs run.
    """

    max_rows = 128

    def __init__(self, ops: CpuOps) -> None:
        self.ops = ops
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._contention = CoreContention()

    def capture(self, step: Step, inputs: Mapping[str, Tensor]) -> tuple[CompiledPlan, tuple[Tensor, ...]]:
        shape_ops = _ShapeOps(self.ops)
        plan = record(shape_ops, inputs, lambda ops: step(ops, inputs))
        required_bytes = -(-plan.arena_bytes // ALIGNMENT) * ALIGNMENT + shape_ops.scratch_bytes
        if required_bytes > len(self._arena):  # existing graphs keep the previous arena
            arena_bytes = max(required_bytes, min(2 * required_bytes, _MAX_OVERSIZED_ARENA_BYTES))
            self._arena = torch.empty(arena_bytes, dtype=torch.uint8)
        graph = CompiledPlan(plan, self.ops, inputs, self._arena, self._contention)
        return graph, graph.replay(list(inputs.values()))


class _ShapeOps(CpuOps):
    """Operations that return uninitialized tensors of the right shapes, for `record`.

    The tensors are allocated but not written to, so that the operating system provides no pages for large
    tensors.
    """

    def __init__(self, ops: CpuOps) -> None:
        super().__init__(capturing_kernels(ops.isa, []))
        self._tables = ops._tables  # all compiled steps share the tables of experts
        self.scratch_bytes = 0  # maximum scratch memory of an operation so far

    def _report_fallback(self, operation: str, conditions: Mapping[str, bool]) -> NoReturn:
        raise UnrecordableStepError(f"{operation} has no kernel for its arguments")

    def _scratch(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.scratch_bytes = max(self.scratch_bytes, prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype)


def make_graph_compiler(ops: Ops) -> CpuGraphCompiler | None:
    """Return the compiler of ``ops``; None if their class is a subclass of `CpuOps` or unrelated to it.

    Compiled steps would ignore the methods that a subclass overrides.
    """
    return CpuGraphCompiler(ops) if type(ops) is CpuOps else None
