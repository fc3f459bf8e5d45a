"""Compiled steps: one library call, or a few, run all operations of a recorded step.

Compilation calls the same methods of `CpuOps` as an eager step, with the plan's tensors at their final
addresses. `_CapturingOps` captures the kernel calls instead of running them. A step with an operation that
would run on the reference kernels cannot be compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from penstock.kernels.collectives import Collectives
from penstock.kernels.cpu.library import (
    CapturedCall,
    CompiledLoop,
    CompiledSteps,
    CoreContention,
    capturing_kernels,
)
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.experts import PackedExperts
from penstock.kernels.graph import Graph
from penstock.kernels.inputs import SamplingInputs, SequenceBlocks
from penstock.kernels.linear import PackedLinear
from penstock.kernels.operations import Arguments, UnrecordableStepError
from penstock.kernels.recording import ALIGNMENT, Plan, Record, result_tensors

_LONG_STEP_MULTIPLICATIONS = 1 << 25
"""A step with more multiplications than this takes at least a millisecond, so its calls release the GIL."""

_MULTIPLICATIONS_PER_CALL = 1 << 32
"""A library call ends with the operation with which its multiplications exceed this number.

Only operations with more than `_MAX_DECODE_ROWS` rows are counted.

If another process uses a core, a single thread runs the rest of a library call, which is slow. The constant
limits a library call to tens of milliseconds, unless its last operation alone takes longer.
"""

_MAX_DECODE_ROWS = 64
"""Steps of up to this many rows run as one library call, whatever their number of multiplications."""

_COLLECTIVES = ("all_reduce", "all_gather")
"""Kernels of recorded steps that wait for other ranks. All library calls of such a step release the GIL."""


class CompiledPlan(Graph):
    """A `Plan` compiled into one library call, or into a few calls if it has many rows.

    A replay copies the inputs to the buffers that the kernels read, and the results to new tensors.

    Args:
        plan: the recorded step.
        ops: the operations whose kernels the plan calls.
        inputs: the recorded inputs by name, contiguous. The plan uses them as its input buffers.
        arena: memory of at least ``plan.arena_bytes`` bytes. Plans that never run concurrently may share it.
            Operations use the memory after these bytes as scratch memory.
        contention: the state that all compiled steps of a session share if they run as one library call.

    Raises:
        UnrecordableStepError: an operation has no kernel for its arguments, needs the lengths of the
            sequences, or needs more memory than its results and the scratch memory.
    """

    def __init__(
        self, plan: Plan, ops: CpuOps, inputs: Mapping[str, Tensor], arena: Tensor, contention: CoreContention
    ) -> None:
        assert arena.nbytes >= plan.arena_bytes
        resolve = plan.resolver(arena, [inputs[name] for name in plan.inputs])
        capturing_ops = _CapturingOps(ops, arena[-(-plan.arena_bytes // ALIGNMENT) * ALIGNMENT :])
        call_ends: list[int] = []  # numbers of kernels captured when a library call ends
        multiplications = call_multiplications = 0
        for record in plan.records:
            arguments = record.resolved(resolve)
            capturing_ops.capture(record.operation, arguments, [resolve(ref) for ref in record.results])
            rows, record_multiplications = _count_multiplications(record, arguments)
            multiplications += record_multiplications
            call_multiplications += record_multiplications if rows > _MAX_DECODE_ROWS else 0
            if call_multiplications > _MULTIPLICATIONS_PER_CALL:
                call_ends.append(len(capturing_ops.captured))
                call_multiplications = 0
        has_collectives = any(call.name in _COLLECTIVES for call in capturing_ops.captured)
        releases_gil = has_collectives or multiplications > _LONG_STEP_MULTIPLICATIONS
        self._calls = [
            CompiledSteps(ops.isa, captured, releases_gil=releases_gil, contention=state)
            for captured, state in _split_calls(capturing_ops.captured, call_ends, contention)
        ]
        # The calls contain only addresses, so this object must keep the memory alive.
        self._kept_alive = (plan, arena)
        self._capturing_ops = capturing_ops
        self._contention = contention
        self._loop: _SamplingLoop | None = None
        self._results = [resolve(ref) for ref in plan.results]
        assert all(result.is_contiguous() for result in self._results)
        self._buffers = {name: inputs[name] for name in plan.inputs}
        self._inputs = [(buffer, buffer.data_ptr(), buffer.nbytes) for buffer in self._buffers.values()]

    def __len__(self) -> int:
        return sum(map(len, self._calls))

    @property
    def description(self) -> str:
        calls = "one call" if len(self._calls) == 1 else f"{len(self._calls)} calls"
        return f"{len(self)} kernels in {calls}"

    @property
    def memory(self) -> Sequence[Tensor]:
        _, arena = self._kept_alive
        return [arena, *self._buffers.values()]

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._copy_inputs(inputs)
        self.run()
        return tuple(map(_copy, self._results))

    def replay_steps(
        self,
        inputs: Sequence[Tensor],
        step_values: Mapping[str, Tensor],
        sampling: SamplingInputs,
        uniforms: Tensor,
        stop_tokens: Tensor,
        ranks: Collectives | None = None,
    ) -> Tensor:
        self._copy_inputs(inputs)
        if self._loop is None:
            self._loop = _SamplingLoop(
                self._capturing_ops, self._results[0], self._buffers["tokens"], self._contention, ranks
            )
        addressed_values = [(self._buffers[name].data_ptr(), values) for name, values in step_values.items()]
        return self._loop.run(addressed_values, sampling, uniforms, stop_tokens)

    def run(self) -> None:
        for call in self._calls:
            _check(call())

    def _copy_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Copy the inputs to the buffers that the kernels read.

        A matrix may have fewer columns than its buffer. Where possible, memmove copies, which is faster than
        `Tensor.copy_`.
        """
        for (buffer, address, num_bytes), source in zip(self._inputs, inputs, strict=True):
            is_row = source.dim() == 2 and len(source) == 1 and source.nbytes < num_bytes
            is_movable = source.dtype == buffer.dtype and source.is_contiguous()
            if is_movable and (is_row or source.nbytes == num_bytes):
                ctypes.memmove(address, source.data_ptr(), source.nbytes)
            elif source.dim() == 2:
                buffer[:, : source.shape[1]].copy_(source)
            else:
                buffer.copy_(source)


class _SamplingLoop:
    """The kernels of a plan, followed by sampling on rank 0 and a copy of the tokens to the other ranks.

    One library call runs several such steps.

    Args:
        capturing_ops: the operations that have captured the kernels of the plan.
        logits: the result of the plan, ``[R, V]``.
        tokens: the input of the plan to which the sampling kernel writes, ``[R]``.
        contention: the state that all compiled steps of a session share.
        ranks: the ranks of the model, or None if the model has one rank.
    """

    def __init__(
        self,
        capturing_ops: _CapturingOps,
        logits: Tensor,
        tokens: Tensor,
        contention: CoreContention,
        ranks: Collectives | None,
    ) -> None:
        rows = len(logits)
        self._sampling = SamplingInputs(
            temperature=torch.empty(rows, dtype=torch.float32),
            top_k=torch.empty(rows, dtype=torch.int64),
            top_p=torch.empty(rows, dtype=torch.float32),
            min_p=torch.empty(rows, dtype=torch.float32),
            uniforms=torch.empty(rows, dtype=torch.float64),
        )
        if ranks is None or ranks.rank == 0:
            capturing_ops.capture("sample", {"logits": logits, "sampling": self._sampling}, [tokens])
        if ranks is not None:
            capturing_ops.broadcast_from_rank_0(tokens, ranks)
        self._rows = rows
        self._run = CompiledLoop(
            capturing_ops.isa,
            capturing_ops.captured,
            tokens_address=tokens.data_ptr(),
            rows=rows,
            contention=contention,
        )

    def run(
        self,
        step_values: Sequence[tuple[int, Tensor]],
        sampling: SamplingInputs,
        uniforms: Tensor,  # [n, R]
        stop_tokens: Tensor,  # [R, stops]
    ) -> Tensor:  # [m, R]
        """Run up to n steps and return the sampled tokens of the m steps that ran, see `Graph.replay_steps`.

        ``step_values`` has, for each input that differs between steps, the address of its buffer and its
        values ``[n, ...]``.
        """
        target = self._sampling
        for name in ("temperature", "top_k", "top_p", "min_p"):
            getattr(target, name).copy_(getattr(sampling, name))
        num_steps = len(uniforms)
        step_inputs = [(to, values.data_ptr(), values.nbytes // num_steps) for to, values in step_values]
        step_inputs.append((target.uniforms.data_ptr(), uniforms.data_ptr(), uniforms.nbytes // num_steps))
        sampled_tokens = torch.empty(num_steps, self._rows, dtype=torch.int64)
        stop_table = (stop_tokens.data_ptr(), stop_tokens.shape[1])
        num_steps_run, failed_kernel = self._run(
            step_inputs, stop_table, sampled_tokens.data_ptr(), num_steps
        )
        _check(failed_kernel)
        return sampled_tokens[:num_steps_run]


def _check(failed_kernel: str | None) -> None:
    """Raise if a kernel failed.

    Raises:
        IndexError: ``failed_kernel`` is the name of a kernel, not None. The kernel got an index outside its
            table, or waited for another rank in vain.
    """
    if failed_kernel is not None:
        reason = "an index is outside its table, or another rank has exited"
        raise IndexError(f"{failed_kernel} of a recorded step failed: {reason}")


def _copy(result: Tensor) -> Tensor:
    """Return a copy of a contiguous tensor. For a row of logits, several times as fast as `Tensor.clone`."""
    copy = torch.empty_like(result)
    ctypes.memmove(copy.data_ptr(), result.data_ptr(), result.nbytes)
    return copy


def _count_multiplications(record: Record, arguments: Arguments) -> tuple[int, int]:
    """Return the number of rows and an upper bound of the number of multiplications of an operation.

    Returns (0, 0) for operations other than linear layers, experts and encoder attention. The number is exact
    for linear layers and for experts of a single rank.
    """
    packed = arguments.get("packed")
    if isinstance(packed, PackedLinear):
        rows = len(arguments["x"])
        return rows, rows * _multiplications_per_row(packed)
    if isinstance(packed, PackedExperts):
        gate_up, down = packed.gate_up[0], packed.down[0]
        multiplications_per_pair = _multiplications_per_row(gate_up) + _multiplications_per_row(down)
        return len(arguments["x"]), arguments["topk_ids"].numel() * multiplications_per_pair
    if record.operation == "encoder_attention":
        rows, heads, dim = arguments["q"].shape
        max_keys = int(arguments["blocks"].lengths.max())
        return rows, 2 * rows * max_keys * heads * dim
    return 0, 0


def _multiplications_per_row(packed: PackedLinear) -> int:
    """Return the multiplications of a linear layer for one row."""
    return packed.in_features * packed.out_features


def _split_calls(
    captured: Sequence[CapturedCall], call_ends: Sequence[int], contention: CoreContention
) -> Iterator[tuple[Sequence[CapturedCall], CoreContention]]:
    """Yield the captured kernels and the contention state of each library call.

    A single library call uses ``contention``. Several library calls have new states.
    """
    bounds = sorted({0, *call_ends, len(captured)})
    for start, end in pairwise(bounds):
        yield captured[start:end], contention if len(bounds) == 2 else CoreContention()


class _CapturingOps(CpuOps):
    """Operations that capture their kernel calls instead of running them. Results are tensors of the plan."""

    def __init__(self, ops: CpuOps, scratch: Tensor) -> None:
        self.captured: list[CapturedCall] = []
        self._kept_tensors: list[Tensor] = []
        self._destinations: list[Tensor] = []
        self._scratch_memory = scratch
        super().__init__(capturing_kernels(ops.isa, self.captured))
        self._tables = ops._tables  # all compiled steps share the tables of experts

    def capture(self, operation: str, arguments: Mapping[str, object], results: Sequence[Tensor]) -> None:
        """Capture the kernel calls of one operation, which write to ``results``.

        Raises:
            UnrecordableStepError: C++ kernels alone cannot compute the operation, or it needs more memory
                than ``results`` and the scratch memory.
        """
        num_earlier_calls = len(self.captured)
        self._destinations = list(results)
        returned = result_tensors(getattr(self, operation)(**arguments))
        are_written = [tensor.data_ptr() for tensor in returned] == [result.data_ptr() for result in results]
        if self._destinations or not are_written or len(self.captured) == num_earlier_calls:
            raise UnrecordableStepError(f"{operation} needs more than C++ kernels")

    def broadcast_from_rank_0(self, tensor: Tensor, ranks: Collectives) -> None:
        """Capture the kernel that copies a small contiguous tensor from rank 0 to all ranks."""
        self._kernels.from_rank_0(tensor.data_ptr(), tensor.nbytes, ranks.region, ranks.rank)

    def sequence_blocks(self, row_offsets: Tensor) -> SequenceBlocks:
        """Raise `UnrecordableStepError`, because the lengths differ between replays."""
        raise UnrecordableStepError("an operation needs the lengths of the sequences")

    def _report_fallback(self, operation: str, conditions: Mapping[str, bool]) -> NoReturn:
        """Raise `UnrecordableStepError`, because reference kernels cannot be compiled."""
        raise UnrecordableStepError(f"{operation} has no kernel for its arguments")

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        result = self._destinations.pop(0) if self._destinations else None
        if result is None or tuple(result.shape) != tuple(shape) or result.dtype != dtype:
            raise UnrecordableStepError("an operation needs memory in addition to its results")
        assert result.is_contiguous()
        return result

    def _scratch(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes > len(self._scratch_memory):
            raise UnrecordableStepError("an operation needs more scratch memory than the plan has")
        return self._scratch_memory[:num_bytes].view(dtype).view(*shape)

    def _keep_alive(self, tensor: Tensor) -> Tensor:
        self._kept_tensors.append(tensor)
        return tensor
