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

_MEMORY_FRACTION = 0.05
"""Fraction of the device's memory that graphs may take."""


class CudaGraph(Graph):
    """A step captured in a CUDA graph.

    Args:
        ops: the operations that sample tokens between steps.
        graph: torch's graph.
        inputs: the tensors that the graph reads, by name.
        results: the tensors that the graph writes. The first result has the logits ``[R, V]``.
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
        """The inputs of the graph. The memory pool of all graphs holds its results and activations."""
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
        step_values: Mapping[str, Tensor],
        sampling: SamplingInputs,
        uniforms: Tensor,
        stop_tokens: Tensor,
        ranks: Collectives | None = None,
    ) -> Tensor | None:
        """Launch all steps without waiting for them; `Graph.replay_steps` describes the arguments.

        ``stop_tokens`` has no effect: all steps run, because the host does not read the tokens between steps.
        Returns None if the model has several ranks.
        """
        if ranks is not None:
            return None
        _copy(self._inputs.values(), inputs)
        device = inputs[0].device
        uniforms = upload(uniforms, device)
        tokens = torch.empty(uniforms.shape, dtype=torch.int64, device=device)
        for step in range(len(uniforms)):
            if step:  # a row with non-finite logits (-1) continues with token 0; its later tokens are unused
                torch.clamp(tokens[step - 1], min=0, out=self._inputs["tokens"])
                step_inputs = (self._inputs[name] for name in step_values)
                _copy(step_inputs, [values[step] for values in step_values.values()])
            self._graph.replay()
            step_sampling = replace(sampling, uniforms=uniforms[step])
            tokens[step] = self._ops.sample(self._results[0], step_sampling)
        return tokens


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy each source to its target. A source may have fewer columns than its target.

    One launch per element type copies all tensors that are not matrices.
    """
    pairs_by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if source.dim() == 2:
            target[:, : source.shape[1]].copy_(source, non_blocking=True)
        else:
            pair = pairs_by_type.setdefault(target.dtype, ([], []))
            pair[0].append(target)
            pair[1].append(source)
    for targets_of_type, sources_of_type in pairs_by_type.values():
        torch._foreach_copy_(targets_of_type, sources_of_type, non_blocking=True)


class CudaGraphCompiler(GraphCompiler):
    """Captures steps in CUDA graphs that share one memory pool, because only one step runs at a time.

    A step runs once before its capture, so that Triton programs are compiled and libraries allocate their
    buffers. Run and capture use the same side stream, because torch has a separate memory pool for each
    stream.

    Args:
        ops: the operations.
        cuda: the module `torch.cuda`, or a replacement for tests.
        max_bytes: bytes of graphs and their inputs from which on no further graph is captured. The default is
            `_MEMORY_FRACTION` of the device's memory.
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
        self._logged_reasons: set[str] = set()

    def capture(self, step: Step, inputs: Mapping[str, Tensor]) -> tuple[CudaGraph, tuple[Tensor, ...]]:
        cuda, max_bytes = self._cuda, self._get_max_bytes()
        used_bytes = self._pool_bytes + self._input_bytes
        if used_bytes >= max_bytes:
            raise self._make_error(f"CUDA graphs take {used_bytes >> 20} of {max_bytes >> 20} MiB")
        if self._stream is None:
            self._stream = cuda.Stream()
        stream = self._stream
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            results = tuple(step(self.ops, inputs))
        cuda.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = cuda.graph_pool_handle()
        reserved_bytes_before, graph = cuda.memory_reserved(), cuda.CUDAGraph()
        try:
            with cuda.graph(graph, pool=self._pool, stream=stream):
                graph_results = tuple(step(self.ops, inputs))
        except RuntimeError as error:
            raise self._make_error(f"CUDA cannot capture this step: {error}") from error
        self._pool_bytes += max(cuda.memory_reserved() - reserved_bytes_before, 0)
        cuda_graph = CudaGraph(self.ops, graph, inputs, graph_results)
        input_bytes = sum(tensor.nbytes for tensor in cuda_graph.memory)
        self._input_bytes += input_bytes
        finalize(cuda_graph, self._subtract_inputs, input_bytes)
        return cuda_graph, results

    def _subtract_inputs(self, input_bytes: int) -> None:
        """Stop counting the inputs of a deleted graph. The pool keeps its other memory for other graphs."""
        self._input_bytes -= input_bytes

    def _get_max_bytes(self) -> int:
        """Return the bytes of graphs and their inputs from which on no further graph is captured."""
        if self._max_bytes is None:
            self._max_bytes = int(_MEMORY_FRACTION * self._cuda.mem_get_info()[1])
        return self._max_bytes

    def _make_error(self, reason: str) -> UnrecordableStepError:
        """Return the error that makes the caller run a step eagerly.

        Log the first line of each reason once.
        """
        line = reason.splitlines()[0]
        if line not in self._logged_reasons:
            self._logged_reasons.add(line)
            _logger.warning("%s: steps of this shape run without a graph, which is slower", line)
        return UnrecordableStepError(line)


def make_graph_compiler(ops: Ops) -> CudaGraphCompiler | None:
    """Return the compiler of ``ops``; None if they are not `CudaOps` on a GPU."""
    is_usable = isinstance(ops, CudaOps) and torch.cuda.is_available()
    return CudaGraphCompiler(ops) if is_usable else None
