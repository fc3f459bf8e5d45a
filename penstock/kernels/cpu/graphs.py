"""Compiles recorded steps for the C++ kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.kernels.cpu.library import CoreContention
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.plan import CompiledPlan
from penstock.kernels.graph import GraphCompiler, Step
from penstock.kernels.ops import Ops
from penstock.kernels.recording import record


class CpuGraphCompiler(GraphCompiler):
    """Records steps and compiles the records. The graphs share one arena, because one step runs at a time.

    Args:
        ops: the operations to record on.
    """

    max_rows = 64

    def __init__(self, ops: CpuOps) -> None:
        self.ops = ops
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._contention = CoreContention()

    def capture(self, step: Step, inputs: Mapping[str, Tensor]) -> tuple[CompiledPlan, tuple[Tensor, ...]]:
        results: list[Tensor] = []

        def run(ops: Ops) -> list[Tensor]:
            results.extend(step(ops, inputs))
            return results

        plan = record(self.ops, inputs, run)
        if plan.arena_bytes > len(self._arena):  # earlier graphs keep the smaller arena
            self._arena = torch.empty(2 * plan.arena_bytes, dtype=torch.uint8)
        return CompiledPlan(plan, self.ops, inputs, self._arena, self._contention), tuple(results)


def graphs_of(ops: Ops) -> CpuGraphCompiler | None:
    """Return the compiler of these operations, or None if they are not exactly `CpuOps`.

    A subclass overrides methods, and the compiled kernels would not call its overrides.
    """
    return CpuGraphCompiler(ops) if type(ops) is CpuOps else None
