"""Records a step as data: its operations, their order and their tensors.

`record` runs a step on a back end and records every operation. The resulting `Plan` names each tensor by its
location, so that a replay needs neither the model nor Python between two operations:

* A *weight* is held by the plan: packed linears, tables, norms, the KV cache, and the matrices of adapters.
  Their contents may change in place. The experts of a layer are held as one object, because there may be
  hundreds.
* An *input* is an argument of each replay: tokens, positions, block tables, the adapter of each row.
* Every other tensor is at an offset of the *arena*. Tensors with disjoint lifetimes can share memory.

A step can be recorded if its model applies only operations and views to activations. The result of any
other function has no known location. Passing such a result to an operation raises `UnrecordableStepError`.
Sizes are part of the plan, which replays only steps of exactly the recorded shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from penstock.kernels.experts import PackedExperts
from penstock.kernels.inputs import LayerKV, LayerState, LoRAInputs
from penstock.kernels.operations import Arguments, Operation, UnrecordableStepError, collect_operations
from penstock.kernels.ops import Ops

T = TypeVar("T")
Results: TypeAlias = Tensor | tuple[Tensor, ...] | None
"""The result of an operation: one tensor, several, or None."""
ALIGNMENT = 64
"""Alignment of buffers in bytes: the size of a cache line and of the widest vector register."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of a plan: a strided view of a weight, an input or the arena."""

    kind: str  # "weight", "input" or "arena"
    index: int  # index of the weight, of the input or of the buffer in the arena
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # elements from the start of the storage of the weight, input or buffer
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Record:
    """One operation: its arguments, and the locations of its results.

    In the arguments, a `TensorRef` replaces each tensor except those of `PackedExperts`.
    """

    operation: str
    arguments: Arguments
    results: tuple[TensorRef, ...]

    def resolved(self, resolve: Callable[[TensorRef], Tensor]) -> Arguments:
        """Return the arguments with references replaced by tensors."""
        return {name: _map_objects(value, TensorRef, resolve) for name, value in self.arguments.items()}


@dataclass(frozen=True, slots=True)
class Plan:
    """A recorded step."""

    records: tuple[Record, ...]
    weights: tuple[Tensor, ...]
    inputs: tuple[str, ...]  # names, in the order of their index
    arena_offsets: tuple[int, ...]  # offset of each buffer in bytes
    arena_bytes: int
    results: tuple[TensorRef, ...]

    def replay(self, ops: Ops, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run the records on a back end, one by one.

        Args:
            ops: the back end.
            inputs: the tensors of this step, by their names in the recording.

        Returns:
            The results of the step.
        """
        arena = torch.empty(self.arena_bytes, dtype=torch.uint8)
        resolve = self.resolver(arena, [inputs[name] for name in self.inputs])
        for record in self.records:
            arguments = record.resolved(resolve)
            results = getattr(ops, record.operation)(**arguments)
            for ref, result in zip(record.results, result_tensors(results), strict=True):
                resolve(ref).copy_(result)
        return tuple(resolve(ref).clone() for ref in self.results)

    def resolver(self, arena: Tensor, inputs: Sequence[Tensor]) -> Callable[[TensorRef], Tensor]:
        """Return the function that maps a reference to its tensor.

        Args:
            arena: at least ``arena_bytes`` bytes, aligned to `ALIGNMENT`.
            inputs: in the order of ``self.inputs``.
        """

        def resolve(ref: TensorRef) -> Tensor:
            if ref.kind == "arena":
                base, offset = arena, self.arena_offsets[ref.index] // ref.dtype.itemsize + ref.offset
            else:  # the storage may contain tensors of several types; offsets count elements of `ref.dtype`
                base, offset = (self.weights if ref.kind == "weight" else inputs)[ref.index], ref.offset
            empty = torch.empty(0, dtype=ref.dtype, device=base.device)
            return empty.set_(base.untyped_storage(), offset, ref.shape, ref.strides)

        return resolve


def record(ops: Ops, inputs: Mapping[str, Tensor], step: Callable[[Ops], Iterable[Tensor]]) -> Plan:
    """Run ``step`` once and return its plan.

    Args:
        ops: the back end on which the step runs.
        inputs: the tensors that differ between steps, by name.
        step: runs the step on the given operations and returns its results.

    Raises:
        UnrecordableStepError: an operation cannot be recorded, or an argument of an operation or a result of
            the step has no known origin.
    """
    recorder = _Recorder(inputs)
    results = tuple(recorder.activation_ref(tensor) for tensor in step(recording_ops(ops, recorder)))
    offsets, arena_bytes = _allocate_arena(recorder.buffers, recorder.records, results)
    return Plan(
        tuple(recorder.records),
        tuple(recorder.weights),
        tuple(inputs),
        tuple(offsets),
        arena_bytes,
        results,
    )


class _Recorder:
    """Collects the records of a step and the location of each tensor."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self.records: list[Record] = []
        self.weights: list[Tensor] = []
        self.buffers: list[Tensor] = []  # kept alive, so that no storage is reused while recording
        self._locations = {
            tensor.untyped_storage().data_ptr(): ("input", index)
            for index, tensor in enumerate(inputs.values())
        }
        assert len(self._locations) == len(inputs), "two inputs share their memory"

    def add(self, operation: str, arguments: Arguments, results: Results) -> None:
        """Append a record and remember the locations of its results."""
        refs = tuple(self._result_ref(tensor) for tensor in result_tensors(results))
        self.records.append(Record(operation, arguments, refs))

    def activation_ref(self, tensor: Tensor) -> TensorRef:
        """Return the reference of a tensor in the memory of an input, a recorded result or a known weight.

        Raises:
            UnrecordableStepError: the tensor is in other memory.
        """
        location = self._locations.get(tensor.untyped_storage().data_ptr())
        if location is None:
            raise UnrecordableStepError(
                f"a tensor {tuple(tensor.shape)} of {tensor.dtype} comes from no recorded operation"
            )
        return _make_reference(location, tensor)

    def weight_ref(self, tensor: Tensor) -> TensorRef:
        """Return the reference of a tensor that is the same in all steps."""
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._locations:
            self._locations[pointer] = ("weight", len(self.weights))
            self.weights.append(tensor)
        return _make_reference(self._locations[pointer], tensor)

    def references(self, value: object) -> object:
        """Return an argument in which a `TensorRef` replaces each tensor, except those of `PackedExperts`."""
        if isinstance(value, LayerKV):  # all steps use the same cache, but other block tables and slots
            return self._replace_tensors(value, ("cache", "scales"), ("block_tables", "slots"))
        if isinstance(value, LayerState):  # all steps use the same states, but other slots
            return self._replace_tensors(value, ("inputs", "recurrent"), ("slots", "saves"))
        if isinstance(value, LoRAInputs):  # all steps use the same matrices, whose contents may change
            matrices, ranks = (
                _map_objects(part, Tensor, self.weight_ref) for part in (value.matrices, value.ranks)
            )
            lora_refs: dict[str, Any] = {
                "rows": self.activation_ref(value.rows),
                "matrices": matrices,
                "ranks": ranks,
            }
            return replace(value, **lora_refs)
        return _map_objects(value, Tensor, self.activation_ref)

    def _replace_tensors(
        self, value: LayerKV | LayerState, weights: Sequence[str], activations: Sequence[str]
    ) -> object:
        """Return a copy in which references replace the tensors of some fields. None stays None."""
        refs: dict[str, Any] = {name: self.activation_ref(getattr(value, name)) for name in activations}
        for name in weights:
            tensor: Tensor | None = getattr(value, name)
            refs[name] = None if tensor is None else self.weight_ref(tensor)
        return replace(value, **refs)

    def _result_ref(self, tensor: Tensor) -> TensorRef:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._locations:
            self._locations[pointer] = ("arena", len(self.buffers))
            self.buffers.append(tensor)
        return _make_reference(self._locations[pointer], tensor)


def recording_ops(inner: Ops, recorder: _Recorder) -> Ops:
    """Return operations that run on ``inner`` and are recorded.

    The class is generated from the table of operations, so that new operations need no code here.
    """
    methods = {
        name: _make_recording_method(row, inner, recorder)
        for name, row in collect_operations(type(inner)).items()
    }
    cls: type[Ops] = type("RecordingOps", (Ops,), {"name": "recording", **methods})
    return cls()


def _make_recording_method(row: Operation, inner: Ops, recorder: _Recorder) -> Callable[..., Results]:
    """Return the method that runs and records one operation."""
    run: Callable[..., Results] = getattr(inner, row.name)

    def method(_self: Ops, *args: object, **kwargs: object) -> Results:
        if not row.is_recordable:
            raise UnrecordableStepError(f"{row.name} cannot be recorded")
        arguments = row.bind(*args, **kwargs)
        if row.simplify is not None:
            arguments = row.simplify(arguments)
        # References are created first, so that an unrecordable step fails before the operation runs.
        references = {
            name: _map_objects(value, Tensor, recorder.weight_ref)
            if name in row.weights
            else recorder.references(value)
            for name, value in arguments.items()
        }
        results = run(**arguments)
        recorder.add(row.name, references, results)
        return results

    return method


def _allocate_arena(
    buffers: list[Tensor], records: list[Record], results: tuple[TensorRef, ...]
) -> tuple[list[int], int]:
    """Return the offset of each buffer in the arena, and the size of the arena, in bytes.

    Buffers with overlapping lifetimes do not overlap. Each buffer gets the first offset that fits.
    """
    first_use: dict[int, int] = {}
    last_use: dict[int, int] = {}
    for record_index, operation in enumerate(records):
        for ref in (*_find_refs(operation.arguments), *operation.results):
            if ref.kind == "arena":
                first_use.setdefault(ref.index, record_index)
                last_use[ref.index] = record_index
    last_use |= {ref.index: len(records) for ref in results if ref.kind == "arena"}
    offsets: list[int] = []
    sizes = [-(-buffer.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT for buffer in buffers]
    for index, size in enumerate(sizes):
        occupied_ranges = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in range(index)
            if first_use[other] <= last_use[index] and first_use[index] <= last_use[other]
        )
        offset = 0
        for begin, end in occupied_ranges:
            if offset + size <= begin:
                break
            offset = max(offset, end)
        offsets.append(offset)
    return offsets, max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)


def _make_reference(location: tuple[str, int], tensor: Tensor) -> TensorRef:
    """Return the reference of a view ``tensor`` of the storage at a location (kind, index)."""
    shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
    return TensorRef(*location, shape, tensor.stride(), offset, tensor.dtype)


def _find_refs(value: object) -> list[TensorRef]:
    """Return all references in an argument."""
    refs: list[TensorRef] = []
    _map_objects(value, TensorRef, refs.append)
    return refs


def result_tensors(results: Results) -> tuple[Tensor, ...]:
    """Return the results of an operation as a tuple."""
    if results is None:
        return ()
    return results if isinstance(results, tuple) else (results,)


def _map_objects(value: object, kind: type[T], function: Callable[[T], object]) -> object:
    """Apply ``function`` to each ``kind`` object in a value, also inside dataclasses, mappings and tuples.

    `PackedExperts` and lists are not searched.
    """
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, PackedExperts):  # not searched: it may have thousands of weights
        return value
    if isinstance(value, Mapping):
        return {name: _map_objects(item, kind, function) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_map_objects(item, kind, function) for item in value)
    if is_dataclass(value) and not isinstance(value, (type, TensorRef)):
        return replace(
            value, **{f.name: _map_objects(getattr(value, f.name), kind, function) for f in fields(value)}
        )
    return value
