# Results pass through `_run` as they are, whatever the operation returns.
# mypy: disable-error-code="no-any-return"
"""A step as data: which operations ran, in which order, on what.

`RecordingOps` runs a step on another back end and writes down every operation. The `Plan` that comes of
it names each tensor by where it lives, so that whoever replays it needs neither the model nor Python
between two operations:

* a *weight* is held by the plan: packed linears, tables, norms, the KV cache, the room for adapters, whose
  numbers change in place; experts, of which a layer may have hundreds, as the one object that they are;
* an *input* is given anew to each replay: tokens, positions, block tables, which row has which adapter;
* everything else lies at an offset of the *arena*, whose places are used again once their tensor is dead.

A step can be recorded if its model applies nothing but operations and views to activations; any other
function gives a tensor that lives nowhere, and `UnrecordableStepError`. Sizes are part of the plan: it
replays steps of exactly the shapes that it was recorded with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.experts import ClampedSwiGLU, PackedExperts
from penstock.kernels.inputs import LayerKV, LoRAInputs, SamplingInputs
from penstock.kernels.linear import PackedLinear
from penstock.kernels.ops import Activation, Gating, Ops, Routing

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""


class UnrecordableStepError(Exception):
    """The model computes something besides operations and views; the step must run eagerly."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of a plan: a strided view of a weight, an input or the arena."""

    home: str  # "weight", "input" or "arena"
    index: int  # which weight, input or buffer of the arena
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # elements from the beginning of its home
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Record:
    """One operation: its arguments with every tensor replaced by a `TensorRef`, and where results go.

    `PackedExperts` stay as they are.
    """

    operation: str
    arguments: Mapping[str, Any]
    results: tuple[TensorRef, ...]

    def resolved(self, resolve: Callable[[TensorRef], Tensor]) -> dict[str, Any]:
        """The arguments with tensors in place of the references."""
        return {name: _map(value, TensorRef, resolve) for name, value in self.arguments.items()}


@dataclass(frozen=True, slots=True)
class Plan:
    """A recorded step."""

    records: tuple[Record, ...]
    weights: tuple[Tensor, ...]
    inputs: tuple[str, ...]  # names, in the order of their index
    arena_offsets: tuple[int, ...]  # bytes, of each buffer
    arena_bytes: int
    results: tuple[TensorRef, ...]

    def replay(self, ops: Ops, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Runs the records on a back end, one by one.

        Args:
            ops: the back end.
            inputs: the tensors of this step under the names they were recorded with.

        Returns:
            The tensors that `record` was told are the results.
        """
        arena = torch.empty(self.arena_bytes, dtype=torch.uint8)
        resolve = self.resolver(arena, [inputs[name] for name in self.inputs])
        for record in self.records:
            arguments = record.resolved(resolve)
            results = getattr(ops, record.operation)(**arguments)
            for ref, result in zip(record.results, tensors_of(results), strict=True):
                resolve(ref).copy_(result)
        return tuple(resolve(ref).clone() for ref in self.results)

    def resolver(self, arena: Tensor, inputs: Sequence[Tensor]) -> Callable[[TensorRef], Tensor]:
        """What gives the tensor that a reference stands for.

        Args:
            arena: at least ``arena_bytes`` bytes, aligned to `ALIGNMENT`.
            inputs: in the order of ``self.inputs``.
        """

        def resolve(ref: TensorRef) -> Tensor:
            if ref.home == "arena":
                home, offset = arena, self.arena_offsets[ref.index] // ref.dtype.itemsize + ref.offset
            else:  # whose memory may hold tensors of several types
                home, offset = (self.weights if ref.home == "weight" else inputs)[ref.index], ref.offset
            empty = torch.empty(0, dtype=ref.dtype, device=home.device)
            return empty.set_(home.untyped_storage(), offset, ref.shape, ref.strides)

        return resolve


def record(ops: Ops, inputs: Mapping[str, Tensor], step: Callable[[Ops], Iterable[Tensor]]) -> Plan:
    """Runs ``step`` once and returns its plan.

    Args:
        ops: the back end to run it on.
        inputs: the tensors that change from step to step, by name.
        step: runs the step on the operations it is given, and returns its results.

    Raises:
        UnrecordableStepError: an operation was given, or the step returned, a tensor of unknown origin.
    """
    recorder = _Recorder(inputs)
    results = tuple(recorder.activation(tensor) for tensor in step(RecordingOps(ops, recorder)))
    offsets, size = _place(recorder.buffers, recorder.records, results)
    return Plan(
        tuple(recorder.records),
        tuple(recorder.weights),
        tuple(inputs),
        tuple(offsets),
        size,
        results,
    )


class _Recorder:
    """Knows where every tensor of a step lives."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self.records: list[Record] = []
        self.weights: list[Tensor] = []
        self.buffers: list[Tensor] = []  # kept alive, so that no storage is used twice while recording
        self._homes = {
            tensor.untyped_storage().data_ptr(): ("input", index)
            for index, tensor in enumerate(inputs.values())
        }
        assert len(self._homes) == len(inputs), "two inputs share their memory"

    def add(self, operation: str, arguments: dict[str, Any], results: Any) -> None:
        """Appends a record; its results become known."""
        refs = tuple(self._result(tensor) for tensor in tensors_of(results))
        self.records.append(Record(operation, arguments, refs))

    def activation(self, tensor: Tensor) -> TensorRef:
        """A tensor that must be an input, or come from an operation."""
        home = self._homes.get(tensor.untyped_storage().data_ptr())
        if home is None:
            raise UnrecordableStepError(
                f"a tensor {tuple(tensor.shape)} of {tensor.dtype} comes from no recorded operation"
            )
        return _ref(home, tensor)

    def weight(self, tensor: Tensor) -> TensorRef:
        """A tensor that stays from step to step."""
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._homes:
            self._homes[pointer] = ("weight", len(self.weights))
            self.weights.append(tensor)
        return _ref(self._homes[pointer], tensor)

    def _result(self, tensor: Tensor) -> TensorRef:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._homes:
            self._homes[pointer] = ("arena", len(self.buffers))
            self.buffers.append(tensor)
        return _ref(self._homes[pointer], tensor)


class RecordingOps(Ops):
    """Runs operations on another back end and records them."""

    name = "recording"

    def __init__(self, inner: Ops, recorder: _Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        return self._run("embedding", {"tokens": tokens}, {"table": table})

    def linear(self, x: Tensor, packed: PackedLinear, *, lora: LoRAInputs | None = None) -> Tensor:
        own = lora and lora.on(part.name for part in packed.slices)
        adapters = {"lora": own} if own else {}
        return self._run("linear", {"x": x, **adapters}, {"packed": packed})

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._run("rms_norm", {"x": x}, {"weight": weight, "eps": eps})

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        activations = {"x": x, "residual": residual}
        return self._run("add_rms_norm", activations, {"weight": weight, "eps": eps})

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return self._run("layer_norm", {"x": x}, {"weight": weight, "bias": bias, "eps": eps})

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._run("add", {"x": x, "y": y}, {})

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._run("scale", {"x": x}, {"factor": factor})

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return self._run("soft_cap", {"x": x}, {"cap": cap})

    def rope_rows(self, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._run("rope_rows", {"positions": positions}, {"cos": cos, "sin": sin})

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._run("rotary", {"q": q, "k": k, "cos": cos, "sin": sin}, {})

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV) -> None:
        return self._run("store_kv", {"k": k, "v": v, "kv": kv}, {})

    def attention(
        self,
        q: Tensor,
        kv: LayerKV,
        row_offsets: Tensor,
        lengths: Tensor,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        activations = {"q": q, "kv": kv, "row_offsets": row_offsets, "lengths": lengths}
        return self._run("attention", activations, {"scale": scale, "soft_cap": soft_cap, "sinks": sinks})

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        return self._run("gated_activation", {"x": x, "activation": activation}, {})

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        return self._run("activation", {"x": x}, {"activation": activation})

    def clamped_swiglu(self, x: Tensor, gate: ClampedSwiGLU) -> Tensor:
        return self._run("clamped_swiglu", {"x": x}, {"gate": gate})

    def route(self, logits: Tensor, top: int, routing: Routing) -> tuple[Tensor, Tensor]:
        return self._run("route", {"logits": logits}, {"top": top, "routing": routing})

    def experts(
        self,
        x: Tensor,
        packed: PackedExperts,
        shares: Tensor,
        chosen: Tensor,
        gating: Gating,
        *,
        lora: LoRAInputs | None = None,
    ) -> Tensor:
        if lora is not None and lora.on(packed.slice_names()):
            raise UnrecordableStepError("adapters on experts")
        activations = {"x": x, "shares": shares, "chosen": chosen}
        return self._run("experts", activations, {"packed": packed, "gating": gating})

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._run("take_rows", {"x": x, "rows": rows}, {})

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        return self._run("put_rows", {"x": x, "rows": rows, "values": values}, {})

    def sample(self, logits: Tensor, sampling: SamplingInputs, bitmask: Tensor | None = None) -> Tensor:
        return self._run("sample", {"logits": logits, "sampling": sampling, "bitmask": bitmask}, {})

    def _run(self, operation: str, activations: dict[str, Any], constants: dict[str, Any]) -> Any:
        """Resolves the arguments first, so that an unrecordable step fails before it computes."""
        recorder = self._recorder
        arguments = {name: self._refs(value) for name, value in activations.items()}
        arguments |= {name: _map(value, Tensor, recorder.weight) for name, value in constants.items()}
        results = getattr(self._inner, operation)(**activations, **constants)
        recorder.add(operation, arguments, results)
        return results

    def _refs(self, value: Any) -> Any:
        if isinstance(value, LayerKV):  # the cache itself stays; its tables change
            known: dict[str, Any] = {
                "cache": self._recorder.weight(value.cache),
                "scales": None if value.scales is None else self._recorder.weight(value.scales),
                "block_tables": self._recorder.activation(value.block_tables),
                "slots": self._recorder.activation(value.slots),
            }
            return replace(value, **known)
        if isinstance(value, LoRAInputs):  # its matrices stay where they are, whatever is in them
            rows, weight = self._recorder.activation(value.rows), self._recorder.weight
            matrices, ranks = (_map(one, Tensor, weight) for one in (value.matrices, value.ranks))
            return replace(value, **{"rows": rows, "matrices": matrices, "ranks": ranks})
        return _map(value, Tensor, self._recorder.activation)


def _place(
    buffers: list[Tensor], records: list[Record], results: tuple[TensorRef, ...]
) -> tuple[list[int], int]:
    """Offsets of the buffers in the arena: first fit among those alive at the same time; and its size."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for time, one in enumerate(records):
        for ref in (*_refs_of(one.arguments), *one.results):
            if ref.home == "arena":
                first.setdefault(ref.index, time)
                last[ref.index] = time
    last |= {ref.index: len(records) for ref in results if ref.home == "arena"}
    offsets: list[int] = []
    sizes = [-(-buffer.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT for buffer in buffers]
    for index, size in enumerate(sizes):
        alive = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in range(index)
            if first[other] <= last[index] and first[index] <= last[other]
        )
        offset = 0
        for begin, end in alive:
            if offset + size <= begin:
                break
            offset = max(offset, end)
        offsets.append(offset)
    return offsets, max((o + s for o, s in zip(offsets, sizes, strict=True)), default=0)


def _ref(home: tuple[str, int], tensor: Tensor) -> TensorRef:
    shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
    return TensorRef(*home, shape, tensor.stride(), offset, tensor.dtype)


def _refs_of(value: Any) -> list[TensorRef]:
    found: list[TensorRef] = []
    _map(value, TensorRef, found.append)
    return found


def tensors_of(results: Any) -> tuple[Tensor, ...]:
    """What an operation returned, as a tuple."""
    if results is None:
        return ()
    return results if isinstance(results, tuple) else (results,)


def _map(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """``value`` with ``function`` applied to every ``kind`` in it, through dataclasses, mappings, tuples."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, PackedExperts):  # thousands of weights in a model, none of which changes
        return value
    if isinstance(value, Mapping):
        return {name: _map(one, kind, function) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_map(one, kind, function) for one in value)
    if is_dataclass(value) and not isinstance(value, (type, TensorRef)):
        return replace(value, **{f.name: _map(getattr(value, f.name), kind, function) for f in fields(value)})
    return value
