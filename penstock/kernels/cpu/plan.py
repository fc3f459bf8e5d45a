"""A recorded step, compiled: one call of the library, one parallel region for all of its operations.

The arguments of the kernels are packed by the same methods of `CpuOps` that call them in an eager step, given
the plan's tensors at their final places and kernels that keep their arguments instead of running. What one of
these methods would leave to the reference cannot be compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.kernels.cpu.library import (
    Capture,
    CompiledLoop,
    CompiledSteps,
    Neighbours,
    capturing_kernels,
)
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.experts import PackedExperts
from penstock.kernels.graph import Graph
from penstock.kernels.inputs import SamplingInputs
from penstock.kernels.linear import PackedLinear
from penstock.kernels.operations import UnrecordableStepError
from penstock.kernels.recording import Plan, tensors_of

_LONG = 1 << 25
"""Multiplications of a step from which the GIL is released: a millisecond or more."""


class CompiledPlan(Graph):
    """A `Plan` that runs at once.

    A replay copies the step's inputs to where the kernels read them, and its results to new tensors. Inputs
    of two dimensions may have fewer columns than where they are copied to; no kernel may read those beyond.

    Args:
        plan: what was recorded.
        ops: the back end whose kernels run it.
        inputs: the tensors it was recorded with, by name: contiguous, and the plan's own from now on.
        arena: memory of at least ``plan.arena_bytes`` bytes; plans that never run at once may share it.
        neighbours: what plans of this process learn about others; all share one.

    Raises:
        UnrecordableStepError: an operation has no kernel for what it was given.
    """

    def __init__(
        self, plan: Plan, ops: CpuOps, inputs: Mapping[str, Tensor], arena: Tensor, neighbours: Neighbours
    ) -> None:
        assert arena.nbytes >= plan.arena_bytes
        resolve = plan.resolver(arena, [inputs[name] for name in plan.inputs])
        lowering = _CapturingOps(ops)
        work = 0
        for record in plan.records:
            arguments = record.resolved(resolve)
            lowering.lower(record.operation, arguments, [resolve(ref) for ref in record.results])
            packed = arguments.get("packed")
            if isinstance(packed, PackedLinear):
                work += len(arguments["x"]) * _multiplications(packed)
            if isinstance(packed, PackedExperts):
                one = _multiplications(packed.gate_up[0]) + _multiplications(packed.down[0])
                work += arguments["chosen"].numel() * one
        self._steps = CompiledSteps(ops.isa, lowering.captured, long=work > _LONG, neighbours=neighbours)
        self._held = (plan, arena)  # their memory is known to the steps by address alone
        self._lowering = lowering
        self._neighbours = neighbours
        self._rounds: _SamplingLoop | None = None
        self._results = [resolve(ref) for ref in plan.results]
        assert all(result.is_contiguous() for result in self._results)
        self._own = {name: inputs[name] for name in plan.inputs}
        self._inputs = [(buffer, buffer.data_ptr(), buffer.nbytes) for buffer in self._own.values()]

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def description(self) -> str:
        return f"{len(self)} kernels in one call"

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._take(inputs)
        self.run()
        return tuple(map(_copied, self._results))

    def replay_steps(
        self,
        inputs: Sequence[Tensor],
        varied: Mapping[str, Tensor],
        sampling: SamplingInputs,
        uniforms: Tensor,
        ends: Tensor,
    ) -> Tensor:
        self._take(inputs)
        if self._rounds is None:
            self._rounds = _SamplingLoop(
                self._lowering, self._results[0], self._own["tokens"], self._neighbours
            )
        moved = [(self._own[name].data_ptr(), rows) for name, rows in varied.items()]
        return self._rounds.run(moved, sampling, uniforms, ends)

    def run(self) -> None:
        _check(self._steps())

    def _take(self, inputs: Sequence[Tensor]) -> None:
        for (buffer, address, num_bytes), given in zip(self._inputs, inputs, strict=True):
            is_row = given.dim() == 2 and len(given) == 1 and given.nbytes < num_bytes
            is_alike = given.dtype == buffer.dtype and given.is_contiguous()
            if is_alike and (is_row or given.nbytes == num_bytes):
                ctypes.memmove(address, given.data_ptr(), given.nbytes)
            elif given.dim() == 2:
                buffer[:, : given.shape[1]].copy_(given)
            else:
                buffer.copy_(given)


class _SamplingLoop:
    """A plan's kernels with one behind them that samples, to run several times in a row.

    Args:
        lowering: what the plan was lowered by.
        logits: where the plan puts them, ``[R, V]``.
        tokens: where the plan reads them, ``[R]``.
        neighbours: as of the plan.
    """

    def __init__(
        self, lowering: _CapturingOps, logits: Tensor, tokens: Tensor, neighbours: Neighbours
    ) -> None:
        rows = len(logits)
        self._own = SamplingInputs(
            temperature=torch.empty(rows, dtype=torch.float32),
            top_k=torch.empty(rows, dtype=torch.int64),
            top_p=torch.empty(rows, dtype=torch.float32),
            min_p=torch.empty(rows, dtype=torch.float32),
            uniforms=torch.empty(rows, dtype=torch.float64),
        )
        lowering.lower("sample", {"logits": logits, "sampling": self._own}, [tokens])
        self._rows = rows
        self._run = CompiledLoop(
            lowering.isa, lowering.captured, tokens=tokens.data_ptr(), rows=rows, neighbours=neighbours
        )

    def run(
        self,
        moved: Sequence[tuple[int, Tensor]],
        sampling: SamplingInputs,
        uniforms: Tensor,  # [n, R]
        ends: Tensor,  # [R, E]
    ) -> Tensor:  # [m, R]
        """See `Graph.replay_steps`; ``moved``: where each differing input goes, and its rows."""
        own = self._own
        for name in ("temperature", "top_k", "top_p", "min_p"):
            getattr(own, name).copy_(getattr(sampling, name))
        count = len(uniforms)
        varied = [(to, rows.data_ptr(), rows.nbytes // count) for to, rows in moved]
        varied.append((own.uniforms.data_ptr(), uniforms.data_ptr(), uniforms.nbytes // count))
        sampled = torch.empty(count, self._rows, dtype=torch.int64)
        done, failed = self._run(varied, (ends.data_ptr(), ends.shape[1]), sampled.data_ptr(), count)
        _check(failed)
        return sampled[:done]


def _check(failed: str | None) -> None:
    """Refuses what a kernel was given, where one failed.

    Raises:
        IndexError: names it.
    """
    if failed is not None:
        raise IndexError(f"{failed} of a recorded step was given a row that its table has not")


def _copied(result: Tensor) -> Tensor:
    """A contiguous tensor's copy: `Tensor.clone` takes several times as long for the logits of a row."""
    copy = torch.empty_like(result)
    ctypes.memmove(copy.data_ptr(), result.data_ptr(), result.nbytes)
    return copy


def _multiplications(packed: PackedLinear) -> int:
    """Of one row."""
    return packed.in_features * packed.out_features


class _CapturingOps(CpuOps):
    """Writes results to given tensors and records the kernel calls instead of running them."""

    def __init__(self, ops: CpuOps) -> None:
        self.captured: list[Capture] = []
        self.kept: list[Tensor] = []
        self._places: list[Tensor] = []
        super().__init__(capturing_kernels(ops.isa, self.captured))
        self._tables = ops._tables  # of the same experts: one table for all plans

    def lower(self, operation: str, arguments: Mapping[str, Any], places: Sequence[Tensor]) -> None:
        """Captures the kernels of one operation, whose results go to ``places``."""
        before = len(self.captured)
        self._places = list(places)
        results = tensors_of(getattr(self, operation)(**arguments))
        written = [result.data_ptr() for result in results] == [place.data_ptr() for place in places]
        if self._places or not written or len(self.captured) == before:
            raise UnrecordableStepError(f"{operation} does not run as kernels alone")

    def _fall_back(self, operation: str, conditions: Mapping[str, bool]) -> NoReturn:
        """Refuse what only the reference kernels can run: it cannot be compiled."""
        raise UnrecordableStepError(f"{operation} has no kernel for its arguments")

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        place = self._places.pop(0) if self._places else None
        if place is None or tuple(place.shape) != tuple(shape) or place.dtype != dtype:
            raise UnrecordableStepError("an operation needs memory besides its results")
        assert place.is_contiguous()
        return place

    def _kept(self, tensor: Tensor) -> Tensor:
        self.kept.append(tensor)
        return tensor
