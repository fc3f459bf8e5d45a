"""CUDA graphs, with a fake of torch's graph objects that records torch operations on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from penstock.kernels import GraphCache, Ops, SamplingInputs
from penstock.kernels.cuda.graphs import CudaGraphCompiler, make_graph_compiler
from penstock.kernels.cuda.ops import CudaOps
from penstock.kernels.operations import UnrecordableStepError
from penstock.kernels.reference import ReferenceOps

MIB = 1 << 20


class RecordingMode(TorchDispatchMode):
    """Records operations and their results. Reading a value on the host fails, as in a capture on a GPU."""

    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class FakeGraph:
    """A fake of `torch.cuda.CUDAGraph` that repeats the recorded torch operations."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, result in self.calls:
                replayed_result = func(*args, **kwargs)
                if isinstance(result, Tensor) and replayed_result is not result:
                    result.copy_(replayed_result)


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        assert isinstance(other, FakeStream)


class FakeCuda:
    """A fake of the functions of `torch.cuda` that `CudaGraphCompiler` calls."""

    Stream = FakeStream
    CUDAGraph = FakeGraph

    def __init__(self) -> None:
        self.streams: set[FakeStream] = set()
        self.reserved_bytes = 0
        self.pools: list[object] = []
        self.pool = object()

    def current_stream(self) -> FakeStream:
        return FakeStream()

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        assert isinstance(stream, FakeStream)
        self.streams.add(stream)
        yield

    def graph_pool_handle(self) -> object:
        return self.pool

    def memory_reserved(self) -> int:
        return self.reserved_bytes

    def mem_get_info(self) -> tuple[int, int]:
        return 50 * MIB, 100 * MIB

    @contextmanager
    def graph(self, graph: FakeGraph, pool: object, stream: FakeStream) -> Iterator[None]:
        self.pools.append(pool)
        assert stream in self.streams
        with RecordingMode(graph.calls):
            yield
        self.reserved_bytes += 2 * MIB


def run_step(ops: Ops, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return rows of a table plus the sums of the first three block ids."""
    rows = ops.take_rows(torch.arange(12.0).view(6, 2), inputs["tokens"])
    return [ops.add(rows, inputs["tables"][:, :3].sum(1, keepdim=True).float().expand(-1, 2))]


def make_step_inputs(*tokens: int, width: int = 3) -> dict[str, Tensor]:
    block_tables = torch.arange(len(tokens) * width, dtype=torch.int32).view(len(tokens), width)
    return {"tokens": torch.tensor(tokens), "tables": block_tables}


def run_cached(cache: GraphCache, inputs: Mapping[str, Tensor]) -> Tensor | None:
    results = cache.run(len(inputs["tokens"]), inputs, run_step)
    return None if results is None else results[0]


def test_a_step_is_captured_at_its_second_occurrence_and_then_replayed() -> None:
    cuda = FakeCuda()
    cache = GraphCache(CudaGraphCompiler(ReferenceOps(), cuda=cuda))
    assert run_cached(cache, make_step_inputs(1, 2)) is None
    replayed_results = [
        run_cached(cache, inputs)
        for inputs in (make_step_inputs(1, 2), make_step_inputs(5, 0), make_step_inputs(3, 3, width=4))
    ]
    for actual, inputs in zip(
        replayed_results,
        (make_step_inputs(1, 2), make_step_inputs(5, 0), make_step_inputs(3, 3, width=4)),
        strict=True,
    ):
        assert actual is not None
        assert torch.equal(actual, run_step(ReferenceOps(), inputs)[0])
    assert cache.status == "compiled: a CUDA graph"
    assert run_cached(cache, make_step_inputs(1)) is None
    assert run_cached(cache, make_step_inputs(4)) is not None
    assert cuda.pools == [cuda.pool] * 2, "all graphs share one pool"


def test_results_do_not_change_with_the_next_replay() -> None:
    cache = GraphCache(CudaGraphCompiler(ReferenceOps(), cuda=FakeCuda()))
    for _ in range(2):
        run_cached(cache, make_step_inputs(1, 2))
    first_result, expected = (
        run_cached(cache, make_step_inputs(4, 4)),
        run_step(ReferenceOps(), make_step_inputs(4, 4))[0],
    )
    run_cached(cache, make_step_inputs(0, 0))
    assert first_result is not None
    assert torch.equal(first_result, expected)


@pytest.mark.parametrize("uniforms", [[0.0, 0.0, 0.0], [0.1, 0.6, 0.95]])
def test_several_steps_in_one_call_equal_single_steps(uniforms: list[float]) -> None:
    """Three steps in one call sample the tokens of three single steps, greedily or at a temperature of 1."""
    ops, table = ReferenceOps(), torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    table[4] = torch.nan  # the row after token 4 has no finite logits

    def compute_logits(ops: Ops, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        rows = ops.take_rows(table, inputs["tokens"])
        return [ops.add(rows, inputs["positions"][:, None].float().sin().expand(-1, 6) * table[0])]

    def make_inputs(tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
        return {"tokens": tokens, "positions": positions}

    first_tokens, positions = torch.tensor([1, 4]), torch.tensor([[5, 9], [6, 10], [7, 11]])
    temperature = torch.full((2,), float(any(uniforms)))
    sampling_inputs = SamplingInputs(
        temperature, torch.zeros(2).long(), torch.ones(2), torch.zeros(2), torch.zeros(2).double()
    )
    uniforms_per_step = torch.tensor(uniforms, dtype=torch.float64)[:, None].expand(3, 2)
    cache = GraphCache(CudaGraphCompiler(ops, cuda=FakeCuda()))
    inputs = make_inputs(first_tokens, positions[0])
    assert (
        cache.run_loop(
            "key", inputs, {"positions": positions}, sampling_inputs, uniforms_per_step, torch.empty(2, 0)
        )
        is None
    )
    for _ in range(2):
        cache.run("key", inputs, compute_logits)
    actual = cache.run_loop(
        "key", inputs, {"positions": positions}, sampling_inputs, uniforms_per_step, torch.empty(2, 0)
    )
    tokens, expected = first_tokens, []
    for step_positions, step_uniforms in zip(positions, uniforms_per_step, strict=True):
        sampled_ids = ops.sample(
            compute_logits(ops, make_inputs(tokens, step_positions))[0],
            replace(sampling_inputs, uniforms=step_uniforms),
        )
        expected.append(sampled_ids.tolist())
        tokens = sampled_ids.clamp(min=0)
    assert actual is not None
    assert actual.tolist() == expected
    assert expected[0][1] == -1


def test_new_steps_run_eagerly_when_graphs_have_used_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    cache = GraphCache(CudaGraphCompiler(ReferenceOps(), cuda=FakeCuda()))  # the limit is 5 % of 100 MiB
    with caplog.at_level(logging.WARNING):
        was_captured = [
            run_cached(cache, make_step_inputs(*[1] * num_rows)) is not None
            for num_rows in range(1, 7)
            for _ in range(2)
        ]
    assert was_captured == [False, True] * 3 + [False, False] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA graphs take 6 of 5 MiB: steps of this shape run without a graph, which is slower"
    ]
    assert cache.status == "eager: CUDA graphs take 6 of 5 MiB"


def test_all_steps_are_captured_in_one_side_stream() -> None:
    """Torch has a separate memory pool for each stream, so more streams would need more memory."""
    cuda = FakeCuda()
    cache = GraphCache(CudaGraphCompiler(ReferenceOps(), cuda=cuda, max_bytes=100 * MIB))
    for num_rows in (1, 1, 2, 2, 3, 3):
        run_cached(cache, make_step_inputs(*[1] * num_rows))
    assert (cache.num_graphs, len(cuda.streams)) == (3, 1)


def test_inputs_of_a_graph_count_in_the_budget_until_the_graph_is_dropped() -> None:
    """The inputs of a graph are not in the memory pool of the graphs. Inputs with images have megabytes."""
    compiler = CudaGraphCompiler(ReferenceOps(), cuda=FakeCuda(), max_bytes=10 * MIB)
    cache = GraphCache(compiler, max_graphs=1, pads_columns=False)

    def is_captured(num_rows: int) -> bool:  # each graph takes 2 MiB of the pool
        inputs = {"x": torch.zeros(num_rows, 512, 512)}
        results = [
            cache.run(num_rows, inputs, lambda ops, step_inputs: [ops.scale(step_inputs["x"], 2.0)])
            for _ in range(2)
        ]
        return results[1] is not None

    assert is_captured(4)  # 4 MiB of inputs, freed when the next graph replaces this one
    assert is_captured(5)
    assert cache.num_bytes == 5 * MIB
    assert is_captured(1)
    assert is_captured(2)
    assert not is_captured(3)


def test_a_step_that_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    def read_on_host(ops: Ops, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        return [ops.scale(inputs["tokens"].float(), float(inputs["tokens"].sum()))]

    compiler = CudaGraphCompiler(ReferenceOps(), cuda=FakeCuda())
    cache = GraphCache(compiler)
    with caplog.at_level(logging.WARNING):
        assert [cache.run("key", make_step_inputs(1), read_on_host) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "operation not permitted when stream is capturing" in caplog.text
    assert "more lines" not in caplog.text
    with pytest.raises(UnrecordableStepError, match="cannot capture"):
        compiler.capture(read_on_host, make_step_inputs(1))


def test_the_back_end_has_no_graphs_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert make_graph_compiler(CudaOps()) is None
