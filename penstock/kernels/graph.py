"""Compiled steps: a step whose shape recurs is captured once. Replays run no Python code of the model.

A back end provides a `GraphCompiler`, whose `capture` returns a `Graph`. The `GraphCache` of a session
decides which steps are captured, and keeps their graphs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.kernels.collectives import Collectives
from penstock.kernels.inputs import SamplingInputs
from penstock.kernels.operations import UnrecordableStepError
from penstock.kernels.ops import Ops

Step: TypeAlias = Callable[[Ops, Mapping[str, Tensor]], Iterable[Tensor]]
"""A function that runs a step on the given operations and inputs, and returns the results of the step."""

_MAX_SEEN_KEYS = 1024
"""Maximum number of keys that a `GraphCache` remembers after their first occurrence."""
_MIN_COLUMNS = 128
"""Minimum number of columns to which `GraphCache` pads two-dimensional inputs."""


class Graph(ABC):
    """A captured step that can be replayed on other inputs of the same shape."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Description of a replay, such as ``130 kernels in one call``."""

    @property
    def memory(self) -> Sequence[Tensor]:
        """The tensors that the graph holds, except weights. Graphs of one compiler may share tensors."""
        return ()

    @abstractmethod
    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copy the inputs to the captured inputs, run the graph, and return copies of the results.

        Args:
            inputs: the tensors, in the order of the captured inputs. A two-dimensional input may have fewer
                columns than the captured input. The operations must not read the missing columns.

        Raises:
            IndexError: a token or a position is outside its table. Not raised on a GPU.
        """

    @abstractmethod
    def run(self) -> None:
        """Run the graph once more on the inputs of the last replay, for measurements.

        Raises:
            IndexError: a token or a position is outside its table. Not raised on a GPU.
        """

    def replay_steps(
        self,
        inputs: Sequence[Tensor],
        step_values: Mapping[str, Tensor],
        sampling: SamplingInputs,
        uniforms: Tensor,  # [n, R] float64
        stop_tokens: Tensor,  # [R, stops] int64
        ranks: Collectives | None = None,
    ) -> Tensor | None:  # [m, R] int64
        """Run several decode steps in one call. Each step reads the tokens that the previous step sampled.

        Args:
            inputs: inputs of the first step, as for `replay`. One of them is named ``tokens``, ``[R]``.
            step_values: by name, the values ``[n, ...]`` of the other inputs that differ between steps.
            sampling: the parameters of the R rows of the first result. ``sampling.uniforms`` is ignored.
            uniforms: one random number in [0, 1) per step and row.
            stop_tokens: the tokens that end each row, padded with -1.
            ranks: the ranks of the model, which all call this method; None if the model has one rank. All
                ranks use the tokens that rank 0 samples.

        Returns:
            The tokens of the m steps that ran. m may be less than n if every row has sampled a stop token.
            The token of a row with non-finite logits is -1, and the later tokens of this row are undefined.
            None if this graph cannot run several steps in one call.

        Raises:
            IndexError: a token or a position is outside its table. Not raised on a GPU.
            UnrecordableStepError: no kernel can sample from the rows.
        """
        return None


class GraphCompiler(ABC):
    """Captures steps for one instance of `Ops`."""

    max_rows: int
    """Maximum number of rows of captured steps. Steps with more rows would not become faster."""
    max_graphs: int = 64
    """Maximum number of graphs of a `GraphCache`, unless the cache sets another number."""

    @abstractmethod
    def capture(self, step: Step, inputs: Mapping[str, Tensor]) -> tuple[Graph, tuple[Tensor, ...]]:
        """Capture a step. Return its graph, and the results of the step for these inputs.

        Args:
            step: the function that runs the step.
            inputs: contiguous tensors. The graph uses them as its input buffers.

        Raises:
            UnrecordableStepError: the step cannot be captured.
        """


class GraphCache:
    """Graphs by key. A step is captured when its key occurs for the second time.

    Args:
        compiler: captures the steps.
        max_graphs: maximum number of graphs; by default ``max_graphs`` of the compiler. If there are more,
            the least recently used graph is dropped.
        max_bytes: maximum memory of the graphs, see `Graph.memory`; unlimited by default. The least recently
            used graphs are dropped until the others fit. A single graph that is larger than the limit is
            dropped, and its step runs eagerly from then on.
        pads_columns: whether captured two-dimensional inputs are padded to `columns`. A padded graph fits
            block tables of several widths.
    """

    def __init__(
        self,
        compiler: GraphCompiler,
        *,
        max_graphs: int | None = None,
        max_bytes: int | None = None,
        pads_columns: bool = True,
    ) -> None:
        self.compiler = compiler
        self._max_graphs = max_graphs
        self._max_bytes = max_bytes
        self._pads_columns = pads_columns
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()  # least recently used first
        # Keys that occurred, oldest first, each with the reason why its step cannot be captured, or None.
        self._reason_by_key: OrderedDict[Hashable, str | None] = OrderedDict()
        self._last_graph: Graph | None = None
        self._eager_reason: str | None = None  # why the last step without a graph ran eagerly

    @property
    def max_rows(self) -> int:
        """Maximum number of rows of captured steps."""
        return self.compiler.max_rows

    @staticmethod
    def columns(width: int) -> int:
        """Return the number of columns to which a captured input of ``width`` columns is padded."""
        return max(_MIN_COLUMNS, 1 << (width - 1).bit_length())

    @property
    def status(self) -> str | None:
        """How the last step ran: ``compiled: ...`` or ``eager: ...``; None before the first step."""
        if self._last_graph is not None:
            return f"compiled: {self._last_graph.description}"
        return None if self._eager_reason is None else f"eager: {self._eager_reason}"

    @property
    def last_graph(self) -> Graph | None:
        """The graph that ran the last step; None if the last step ran eagerly, or before the first step."""
        return self._last_graph

    @property
    def num_graphs(self) -> int:
        """The number of graphs."""
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that the graphs hold (`Graph.memory`)."""
        return _count_bytes(self._graphs.values())

    def run(self, key: Hashable, inputs: Mapping[str, Tensor], step: Step) -> tuple[Tensor, ...] | None:
        """Run a step by its graph, or capture it. Return its results; None if the caller must run it eagerly.

        Args:
            key: everything that changes the operations of the step, including the sizes of its inputs. The
                sizes of a two-dimensional input are its number of rows and the `columns` of its width.
            inputs: the tensors of the step by name, always in the same order.
            step: the function that runs the step.

        Raises:
            IndexError: a token or a position is outside its table. Not raised on a GPU.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            self._last_graph = graph
            return graph.replay(list(inputs.values()))
        self._last_graph = None
        if key not in self._reason_by_key:  # capturing a step that does not recur costs more than it saves
            self._reason_by_key[key] = None
            if len(self._reason_by_key) > _MAX_SEEN_KEYS:
                self._reason_by_key.popitem(last=False)
            self._eager_reason = "a step of this shape ran once"
            return None
        if (reason := self._reason_by_key[key]) is not None:
            self._eager_reason = reason
            return None
        return self._capture(key, inputs, step)

    def captures_next(self, key: Hashable) -> bool:
        """Return whether `run` will try to capture a step with this key."""
        return key not in self._graphs and self._reason_by_key.get(key, "") is None

    def has(self, key: Hashable) -> bool:
        """Return whether there is a graph for ``key``. Without a graph, `run_loop` returns None."""
        return key in self._graphs

    def run_loop(
        self,
        key: Hashable,
        inputs: Mapping[str, Tensor],
        step_values: Mapping[str, Tensor],
        sampling: SamplingInputs,
        uniforms: Tensor,
        stop_tokens: Tensor,
        ranks: Collectives | None = None,
    ) -> Tensor | None:
        """Run several steps in one call, see `Graph.replay_steps`.

        Returns None if there is no graph for the key, or if the graph cannot run several steps in one call.
        """
        graph = self._graphs.get(key)
        if graph is None:
            return None
        self._graphs.move_to_end(key)
        self._last_graph = graph
        return graph.replay_steps(list(inputs.values()), step_values, sampling, uniforms, stop_tokens, ranks)

    def skip(self, reason: str) -> None:
        """Record, for `status`, that the caller runs a step eagerly without calling `run`, and why."""
        self._last_graph, self._eager_reason = None, reason

    def _capture(self, key: Hashable, inputs: Mapping[str, Tensor], step: Step) -> tuple[Tensor, ...] | None:
        """Capture a step, and return its results; None if it cannot be captured."""
        copy = _copy_padded if self._pads_columns else _copy_contiguous
        graph_inputs = {name: copy(tensor) for name, tensor in inputs.items()}
        try:
            with torch.inference_mode():
                graph, results = self.compiler.capture(step, graph_inputs)
        except UnrecordableStepError as error:
            self._eager_reason = self._reason_by_key[key] = str(error)
            return None  # the caller runs the step eagerly, which overwrites the same keys and values
        graph_bytes, max_bytes = _count_bytes([graph]), self._max_bytes
        if max_bytes is not None and graph_bytes > max_bytes:
            self._eager_reason = self._reason_by_key[key] = (
                f"a graph of {graph_bytes:,} bytes exceeds the limit of {max_bytes:,} bytes"
            )
            return results
        self._graphs[key] = self._last_graph = graph
        max_graphs = self.compiler.max_graphs if self._max_graphs is None else self._max_graphs
        while len(self._graphs) > max_graphs or (max_bytes is not None and self.num_bytes > max_bytes):
            self._graphs.popitem(last=False)
        return results


def _count_bytes(graphs: Iterable[Graph]) -> int:
    """Return the total bytes of `Graph.memory` of graphs. A tensor that several graphs share counts once."""
    tensors = (tensor for graph in graphs for tensor in graph.memory)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _copy_contiguous(tensor: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _copy_padded(tensor: Tensor) -> Tensor:
    """Return a contiguous copy. A two-dimensional tensor is padded with columns of zeros."""
    if tensor.dim() != 2:
        return _copy_contiguous(tensor)
    rows, width = tensor.shape
    copied = torch.zeros(rows, GraphCache.columns(width), dtype=tensor.dtype, device=tensor.device)
    copied[:, :width] = tensor
    return copied
