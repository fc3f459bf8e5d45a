"""CUDA graphs of steps: all kernels of a step are launched as one graph."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

from penstock.kernels.cuda.ops import CudaOps
from penstock.kernels.graph import Graph, GraphCompiler, Step
from penstock.kernels.operations import UnrecordableStepError
from penstock.kernels.ops import Ops

_logger = logging.getLogger(__name__)

_SHARE = 0.05
"""Fraction of the device's memory that graphs may take."""


class CudaGraph(Graph):
    """A captured step.

    Args:
        graph: the graph of torch.
        inputs: the tensors that it reads.
        results: the tensors that it writes.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        self._graph, self._inputs, self._results = graph, tuple(inputs), tuple(results)

    @property
    def description(self) -> str:
        return "a CUDA graph"

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        together: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for own, given in zip(self._inputs, inputs, strict=True):
            if given.dim() == 2:
                own[:, : given.shape[1]].copy_(given, non_blocking=True)
            else:  # one launch copies all tensors of a type
                targets, sources = together.setdefault(own.dtype, ([], []))
                targets.append(own)
                sources.append(given)
        for targets, sources in together.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)
        self._graph.replay()
        return tuple(result.clone() for result in self._results)

    def run(self) -> None:
        self._graph.replay()


class CudaGraphCompiler(GraphCompiler):
    """Captures steps in CUDA graphs that share one memory pool, because one step runs at a time.

    A step runs once before it is captured, so that programs are compiled and libraries allocate their
    buffers.

    Args:
        ops: the operations.
        cuda: the functions of `torch.cuda`.
        max_bytes: memory that all graphs may take; by default a fraction of the device's memory.
    """

    max_rows = 512
    max_graphs = 512

    def __init__(self, ops: Ops, *, cuda: ModuleType = torch.cuda, max_bytes: int | None = None) -> None:
        self.ops = ops
        self._cuda = cuda
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pool: object = None
        self._reported: set[str] = set()

    def capture(self, step: Step, inputs: Mapping[str, Tensor]) -> tuple[CudaGraph, tuple[Tensor, ...]]:
        cuda, limit = self._cuda, self._limit()
        if self._num_bytes >= limit:
            raise self._refusal(f"CUDA graphs take {self._num_bytes >> 20} of {limit >> 20} MiB")
        stream = cuda.Stream()
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
        self._num_bytes += max(cuda.memory_reserved() - before, 0)
        return CudaGraph(graph, list(inputs.values()), captured), results

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
