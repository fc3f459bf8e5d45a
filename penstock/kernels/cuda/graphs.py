"""CUDA graphs of steps: all kernels of a step are launched as one graph."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from weakref import finalize

import torch
from torch import Tensor

from penstock.kernels.collectives import Collectives
from penstock.kernels.cuda.ops import CudaOps
from penstock.kernels.device_queue import upload
from penstock.kernels.graph import Graph, GraphCompiler, Step
from penstock.kernels.inputs import SamplingInputs
from penstock.kernels.operations import UnrecordableStepError
from penstock.kernels.ops import Ops

_logger = logging.getLogger(__name__)

_SHARE = 0.05
"""Fraction of the device's memory that graphs may take."""


class CudaGraph(Graph):
    """A captured step.

    Args:
        ops: the operations, which sample between steps.
        graph: the graph of torch.
        inputs: name -> the tensor that it reads.
        results: the tensors that it writes; the first one is the logits ``[R, V]``.
    """

    def __init__(
        self, ops: Ops, graph: torch.cuda.CUDAGraph, inputs: Mapping[str, Tensor], results: Sequence[Tensor]
    ) -> None:
        self._ops, self._graph = ops, graph
        self._inputs, self._results = dict(inputs), tuple(results)

    @property
    def description(self) -> str:
        return "a CUDA graph"

    @property
    def memory(self) -> Sequence[Tensor]:
        """Its inputs. The memory pool of all graphs holds the results and the activations."""
        return tuple(self._inputs.values())

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        _copy(self._inputs.values(), inputs)
        self._graph.replay()
        return tuple(result.clone() for result in self._results)

    def run(self) -> None:
        self._graph.replay()

    def replay_steps(
        self,
        inputs: Sequence[Tensor],
        varied: Mapping[str, Tensor],
        sampling: SamplingInputs,
        uniforms: Tensor,
        ends: Tensor,
        ranks: Collectives | None = None,
    ) -> Tensor | None:
        """Launch all steps without waiting; `Graph.replay_steps` describes the arguments.

        Rows that have ended continue, because the host does not see the tokens between the steps.
        """
        if ranks is not None:
            return None
        _copy(self._inputs.values(), inputs)
        device = inputs[0].device
        uniforms = upload(uniforms, device)
        tokens = torch.empty(uniforms.shape, dtype=torch.int64, device=device)
        for step in range(len(uniforms)):
            if step:  # a row without finite logits continues with any token: its result is not used
                torch.clamp(tokens[step - 1], min=0, out=self._inputs["tokens"])
                _copy((self._inputs[name] for name in varied), [values[step] for values in varied.values()])
            self._graph.replay()
            draws = replace(sampling, uniforms=uniforms[step])
            tokens[step] = self._ops.sample(self._results[0], draws)
        return tokens


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy tensors; tables may have fewer columns than their targets. One launch copies all of a type."""
    together: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if source.dim() == 2:
            target[:, : source.shape[1]].copy_(source, non_blocking=True)
        else:
            pair = together.setdefault(target.dtype, ([], []))
            pair[0].append(target)
            pair[1].append(source)
    for own, given in together.values():
        torch._foreach_copy_(own, given, non_blocking=True)


class CudaGraphCompiler(GraphCompiler):
    """Captures steps in CUDA graphs that share one memory pool, because one step runs at a time.

    A step runs once before it is captured, so that programs are compiled and libraries allocate their
    buffers. This happens in one side stream, because torch keeps the memory of each stream apart.

    Args:
        ops: the operations.
        cuda: the functions of `torch.cuda`.
        max_bytes: memory that all graphs may take, inputs included; by default a fraction of the device's
            memory.
    """

    max_rows = 512
    max_graphs = 512

    def __init__(self, ops: Ops, *, cuda: ModuleType = torch.cuda, max_bytes: int | None = None) -> None:
        self.ops = ops
        self._cuda = cuda
        self._max_bytes = max_bytes
        self._pool_bytes = 0
        self._input_bytes = 0
        self._pool: object = None
        self._stream: torch.cuda.Stream | None = None
        self._reported: set[str] = set()

    def capture(self, step: Step, inputs: Mapping[str, Tensor]) -> tuple[CudaGraph, tuple[Tensor, ...]]:
        cuda, limit = self._cuda, self._limit()
        used = self._pool_bytes + self._input_bytes
        if used >= limit:
            raise self._refusal(f"CUDA graphs take {used >> 20} of {limit >> 20} MiB")
        if self._stream is None:
            self._stream = cuda.Stream()
        stream = self._stream
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            results = tuple(step(self.ops, inputs))
        cuda.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = cuda.graph_pool_handle()
        before, graph = cuda.memory_reserved(), cuda.CUDAGraph()
        try:
            with cuda.graph(graph, pool=self._pool, stream=stream):
                captured = tuple(step(self.ops, inputs))
        except RuntimeError as error:
            raise self._refusal(f"CUDA cannot capture this step: {error}") from error
        self._pool_bytes += max(cuda.memory_reserved() - before, 0)
        found = CudaGraph(self.ops, graph, inputs, captured)
        size = sum(tensor.nbytes for tensor in found.memory)
        self._input_bytes += size
        finalize(found, self._free_inputs, size)
        return found, results

    def _free_inputs(self, size: int) -> None:
        """Subtract the inputs of a graph that was dropped. The pool keeps its memory for other graphs."""
        self._input_bytes -= size

    def _limit(self) -> int:
        """Return the memory that graphs may take."""
        if self._max_bytes is None:
            self._max_bytes = int(_SHARE * self._cuda.mem_get_info()[1])
        return self._max_bytes

    def _refusal(self, reason: str) -> UnrecordableStepError:
        """Return the error that makes a step run eagerly; log each reason once."""
        line = reason.splitlines()[0]
        if line not in self._reported:
            self._reported.add(line)
            _logger.warning("%s: steps of this shape run without a graph, which is slower", line)
        return UnrecordableStepError(line)


def graphs_of(ops: Ops) -> CudaGraphCompiler | None:
    """Return the compiler of these operations; None if they do not run on a GPU."""
    is_usable = isinstance(ops, CudaOps) and torch.cuda.is_available()
    return CudaGraphCompiler(ops) if is_usable else None
