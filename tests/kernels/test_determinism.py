"""In deterministic back ends, a row has the same bits in any batch and with any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.back_ends import all_back_ends, back_end_params
from support.random_draws import num_examples
from torch import Tensor
from torch.nn import functional as F

from penstock.kernels import (
    OPERATIONS,
    XIELU,
    ClampedSwiGLU,
    LayerKV,
    LinearSlice,
    LoRAInputs,
    Ops,
    PackedExperts,
    PackedLinear,
    SamplingInputs,
)
from penstock.kernels.linear import multiply_floats
from penstock.kernels.reference import ReferenceOps

DTYPES = [torch.float32, torch.bfloat16]
ROWS = 150
"""More rows than any kernel computes at once."""

FEW_EXAMPLES = settings(max_examples=num_examples(4), phases=[Phase.explicit, Phase.reuse, Phase.generate])
"""Settings without shrinking, so that the test that expects failures runs faster."""

RowOperation = Callable[[Ops, Tensor], tuple[Tensor, ...]]
"""Applies an operation to the rows with the given indices ``[R]``. Each result has R rows."""


@pytest.fixture(params=back_end_params(all_back_ends()))
def ops(request: pytest.FixtureRequest) -> Ops:
    return all_back_ends(deterministic=True)[request.param]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


def are_same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors have the same bits.

    -0 differs from 0, and NaNs with equal bits are equal.
    """
    return actual.dtype == expected.dtype and torch.equal(
        actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


# ---- operations on rows ----


def packed_linear(
    out_features: int, in_features: int, dtype: torch.dtype, *, has_bias: bool = False
) -> Callable[[Ops], PackedLinear]:
    """Return a function that packs a layer with a back end and caches the result per back end."""
    weight = torch.randn(out_features, in_features) / in_features**0.5
    slices = LinearSlice("a", 0, out_features // 2), LinearSlice("b", out_features // 2, out_features)
    name = str(dtype).removeprefix("torch.")
    output_bias = torch.randn(out_features) if has_bias else None
    return cache(lambda ops: ops.pack_linear(weight, name, bias=output_bias, slices=slices))


def linear_case(
    in_features: int, out_features: int, *, has_bias: bool
) -> Callable[[torch.dtype], RowOperation]:
    def case(dtype: torch.dtype) -> RowOperation:
        x = torch.randn(ROWS, 2 * in_features).to(dtype)[:, :in_features]  # the rows are strided
        packed_weight = packed_linear(out_features, in_features, dtype, has_bias=has_bias)
        return lambda ops, rows: (ops.linear(x[rows], packed_weight(ops)),)

    return case


def activated_linear_case(activation: str, *, has_bias: bool) -> Callable[[torch.dtype], RowOperation]:
    def case(dtype: torch.dtype) -> RowOperation:
        x, packed_weight = torch.randn(ROWS, 72).to(dtype), packed_linear(130, 72, dtype, has_bias=has_bias)
        return lambda ops, rows: (ops.activated_linear(x[rows], packed_weight(ops), activation),)

    return case


def adapted_linear_case(dtype: torch.dtype) -> RowOperation:
    x, packed_weight = torch.randn(ROWS, 72).to(dtype), packed_linear(60, 72, dtype)
    matrices = {
        name: (torch.randn(3, 9, 72).to(dtype), torch.randn(3, 9, 30).to(dtype).transpose(1, 2))
        for name in "ab"
    }
    lora = LoRAInputs(torch.randint(-1, 3, (ROWS,)), matrices, {"a": torch.tensor([9, 4, 0])})
    return lambda ops, rows: (ops.linear(x[rows], packed_weight(ops), lora=lora.take(rows)),)


def row_case(
    operation: Callable[..., Tensor | tuple[Tensor, ...]], *shapes: tuple[int, ...]
) -> Callable[[torch.dtype], RowOperation]:
    """Return a case of an operation on tensors ``[R, *shape]``, one tensor for each shape."""

    def case(dtype: torch.dtype) -> RowOperation:
        arguments = [3 * torch.randn(ROWS, *shape).to(dtype) for shape in shapes]

        def run(ops: Ops, rows: Tensor) -> tuple[Tensor, ...]:
            results = operation(ops, *(x[rows] for x in arguments))
            return (results,) if isinstance(results, Tensor) else results

        return run

    return case


def rotary_case(dtype: torch.dtype) -> RowOperation:
    q, k = torch.randn(ROWS, 4, 40).to(dtype), torch.randn(ROWS, 2, 40).to(dtype)
    cos, sin = torch.randn(2, ROWS, 10)
    return lambda ops, rows: (
        *ops.rotary(q[rows], k[rows], cos[rows], sin[rows]),
        *ops.rotary(q[rows], k[rows], cos[rows], sin[rows], is_interleaved=True),
    )


def rope_rows_case(dtype: torch.dtype) -> RowOperation:
    positions, (cos, sin) = torch.randint(0, 50, (ROWS,)), torch.randn(2, 50, 20)
    return lambda ops, rows: ops.rope_rows(positions[rows], cos, sin)


def embedding_case(dtype: torch.dtype) -> RowOperation:
    tokens, table = torch.randint(0, 30, (ROWS,)), torch.randn(30, 50).to(dtype)
    return lambda ops, rows: (ops.embedding(tokens[rows], table), ops.take_rows(table, tokens[rows]))


def put_rows_case(dtype: torch.dtype) -> RowOperation:
    x, values = torch.randn(2, ROWS, 50).to(dtype)
    return lambda ops, rows: (ops.put_rows(x[rows], torch.arange(len(rows)), values[rows]),)


def store_kv_case(dtype: torch.dtype) -> RowOperation:
    k, v = torch.randn(2, ROWS, 2, 24).to(dtype)
    slots = torch.randperm(ROWS + 10)[:ROWS]

    def run(ops: Ops, rows: Tensor) -> tuple[Tensor, ...]:
        cache = torch.zeros(2, 10, 2, 16, 24, dtype=dtype)
        ops.store_kv(k[rows], v[rows], LayerKV(cache, torch.zeros(1, 1, dtype=torch.int32), slots[rows]))
        keys, values = cache.transpose(2, 3).flatten(1, 2)[:, slots[rows]]
        return keys, values

    return run


def experts_case(dtype: torch.dtype) -> RowOperation:
    x, logits = torch.randn(ROWS, 40).to(dtype), torch.randn(ROWS, 5)
    gate_ups = [packed_linear(48, 40, dtype) for _ in range(5)]
    downs = [packed_linear(40, 24, dtype) for _ in range(5)]

    def run(ops: Ops, rows: Tensor) -> tuple[Tensor, ...]:
        packed_experts = PackedExperts(
            tuple(pack(ops) for pack in gate_ups), tuple(pack(ops) for pack in downs)
        )
        topk_weights, topk_ids = ops.route(logits[rows], 2, "all_normed")
        return topk_weights, topk_ids, ops.experts(x[rows], packed_experts, topk_weights, topk_ids, "silu")

    return run


def sampling_case(dtype: torch.dtype) -> RowOperation:
    logits = 3 * torch.randn(ROWS, 1000).to(dtype)
    sampling_inputs = SamplingInputs(
        torch.rand(ROWS) * 2,
        torch.randint(0, 60, (ROWS,)),
        torch.rand(ROWS),
        torch.rand(ROWS) / 9,
        torch.rand(ROWS, dtype=torch.float64),
    )
    mask = torch.randint(-(2**31), 2**31, (ROWS, 32)).int()

    def run(ops: Ops, rows: Tensor) -> tuple[Tensor, ...]:
        row_inputs = sampling_inputs.take(rows)
        return ops.sample(logits[rows], row_inputs), ops.sample(logits[rows], row_inputs, mask[rows])

    return run


WEIGHT, BIAS = torch.randn(2, 101)

CASES: dict[str, dict[str, Callable[[torch.dtype], RowOperation]]] = {
    "embedding": {"": embedding_case},
    "linear": {
        "small": linear_case(40, 37, has_bias=True),
        "long rows": linear_case(1031, 130, has_bias=False),
        "work for all threads": linear_case(520, 1030, has_bias=True),
        "several blocks of inputs": linear_case(2600, 70, has_bias=False),
        "with adapters": adapted_linear_case,
    },
    "activated_linear": {
        "gelu": activated_linear_case("gelu", has_bias=True),
        "silu": activated_linear_case("silu", has_bias=False),
    },
    "rms_norm": {
        "": row_case(lambda ops, x: ops.rms_norm(x, WEIGHT, 1e-5), (101,)),
        "of heads": row_case(lambda ops, x: ops.rms_norm(x, WEIGHT[:24], 1e-5), (3, 24)),
    },
    "add_rms_norm": {
        "": row_case(lambda ops, x, y: ops.add_rms_norm(x, y, WEIGHT, 1e-5), (101,), (101,)),
    },
    "layer_norm": {
        "": row_case(lambda ops, x: ops.layer_norm(x, WEIGHT, BIAS, 1e-5), (101,)),
        "of heads": row_case(
            lambda ops, x: ops.layer_norm(x, WEIGHT[:72].view(3, 24), BIAS[:72].view(3, 24), 1e-5), (3, 24)
        ),
    },
    "add_layer_norm": {
        "": row_case(lambda ops, x, y: ops.add_layer_norm(x, y, WEIGHT, BIAS, 1e-5), (101,), (101,))
    },
    "layer_norm_of_sum": {
        "": row_case(lambda ops, x, y: ops.layer_norm_of_sum(x, y, WEIGHT, BIAS, 1e-5), (101,), (101,))
    },
    "add": {"": row_case(lambda ops, x, y: ops.add(x, y), (101,), (101,))},
    "multiply": {"": row_case(lambda ops, x, y: ops.multiply(x, y), (101,), (101,))},
    "scale": {"": row_case(lambda ops, x: ops.scale(x, 0.3), (101,))},
    "clamp": {"": row_case(lambda ops, x: ops.clamp(x, -0.7, 0.6), (101,))},
    "soft_cap": {"": row_case(lambda ops, x: ops.soft_cap(x, 2.5), (101,))},
    "rope_rows": {"": rope_rows_case},
    "rotary": {"": rotary_case},
    "store_kv": {"": store_kv_case},
    "attention": {},  # see `check_attention_rows_are_independent`
    "encoder_attention": {},  # test_encoder_attention.py compares whole sequences
    "sequence_means": {},  # test_activated_linear.py compares whole sequences
    "short_convolution": {},  # test_recurrent.py compares whole sequences of this and the next operation
    "gated_delta_rule": {},
    "apply_gate": {
        "": row_case(lambda ops, x, y: ops.apply_gate(x, y, "silu"), (3, 50), (3, 50)),
        "sigmoid": row_case(lambda ops, x, y: ops.apply_gate(x, y, "sigmoid"), (3, 50), (3, 50)),
    },
    "gated_activation": {
        name: row_case(lambda ops, x, name=name: ops.gated_activation(x, name), (2 * 101,))
        for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2")
    },
    "activation": {
        name: row_case(lambda ops, x, name=name: ops.activation(x, name), (101,))
        for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2")
    },
    "xielu": {"": row_case(lambda ops, x: ops.xielu(x, XIELU(0.8, 1.3, 0.5, -1e-6)), (101,))},
    "clamped_swiglu": {"": row_case(lambda ops, x: ops.clamped_swiglu(x, ClampedSwiGLU(1.7, 2)), (202,))},
    "route": {
        routing: row_case(lambda ops, x, routing=routing: ops.route(x, 3, routing), (13,))
        for routing in ("all", "all_normed", "chosen")
    },
    "experts": {"": experts_case},
    "scale_rows": {
        "": row_case(lambda ops, x, y: ops.scale_rows(x, y), (101,), (1,)),
        "by logits": row_case(lambda ops, x, y: ops.scale_rows(x, y, are_logits=True), (101,), (1,)),
    },
    "widen": {"": row_case(lambda ops, x: (ops.widen(x),), (101,))},
    "all_reduce": {},  # tests/distributed compares this and the next two operations on several processes
    "all_gather": {},
    "embedding_part": {},
    "take_rows": {"": embedding_case},
    "put_rows": {"": put_rows_case},
    "sample": {"": sampling_case},
    "snake": {"": row_case(lambda ops, x: ops.snake(x, WEIGHT, BIAS), (101,))},
    "add_scaled": {
        "": row_case(lambda ops, x, y, factor: ops.add_scaled(x, y, factor.float()), (101,), (101,), ())
    },
    "polar": {"": row_case(lambda ops, x: ops.polar(x, 100.0), (50,))},
    "conv1d": {},  # test_convolution.py compares whole sequences of this and the next three operations
    "conv_transpose1d": {},
    "group_norm": {},
    "overlap_add": {},
}  # fmt: skip


def test_the_cases_name_every_operation() -> None:
    assert set(CASES) == set(OPERATIONS)


def check_rows_are_independent(ops: Ops, run: RowOperation) -> None:
    """Check that rows have the same bits in random batches and alone as in the batch of all rows."""
    all_rows = torch.arange(ROWS)
    full_result = run(ops, all_rows)

    @FEW_EXAMPLES
    @given(
        rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True),
        num_threads=st.sampled_from([1, 2]),
    )
    def check(rows: list[int], num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        for actual, expected in zip(run(ops, torch.tensor(rows)), full_result, strict=True):
            assert are_same_bits(actual, expected[rows])

    check()
    for row in (0, 7, ROWS - 1):
        for actual, expected in zip(run(ops, all_rows[row : row + 1]), full_result, strict=True):
            assert are_same_bits(actual, expected[row : row + 1])


@pytest.mark.matrix
@pytest.mark.usefixtures("_restore_num_threads")
@pytest.mark.parametrize(
    "case", [f"{name}/{variant}".rstrip("/") for name, cases in CASES.items() for variant in cases]
)
def test_rows_have_the_same_bits_alone_and_in_any_batch(ops: Ops, dtype: torch.dtype, case: str) -> None:
    torch.manual_seed(0)
    name, _, variant = case.partition("/")
    check_rows_are_independent(ops, CASES[name][variant](dtype))


# ---- attention ----


@dataclass(frozen=True)
class TokenSequence:
    """A sequence whose attention is computed in ranges of rows."""

    q: Tensor  # [T, H, D]
    keys_and_values: Tensor  # [2, K, T, D]


def random_sequence(
    length: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> TokenSequence:
    return TokenSequence(
        torch.randn(length, num_heads, head_dim).to(dtype),
        torch.randn(2, num_kv_heads, length, head_dim).to(dtype),
    )


def attend(
    ops: Ops, sequences: Sequence[tuple[TokenSequence, int, int]], block_size: int, **options: object
) -> list[Tensor]:
    """Return the attention of the rows start:end of each sequence. The KV cache has all tokens up to ``end``.

    The blocks are in random order. Slots after the last token of a sequence are NaN.
    """
    window = options.pop("window", None)
    block_counts = [-(-end // block_size) for _, _, end in sequences]
    block_ids = (torch.randperm(sum(block_counts)) + 1).int().split(block_counts)
    num_kv_heads, head_dim = (
        sequences[0][0].keys_and_values.shape[1],
        sequences[0][0].keys_and_values.shape[3],
    )
    cache = torch.full(
        (2, sum(block_counts) + 1, num_kv_heads, block_size, head_dim),
        torch.nan,
        dtype=sequences[0][0].q.dtype,
    )
    block_tables = torch.zeros(len(sequences), max(block_counts), dtype=torch.int32)
    for b, (sequence, _, end) in enumerate(sequences):
        keys_so_far = F.pad(
            sequence.keys_and_values[:, :, :end],
            (0, 0, 0, block_counts[b] * block_size - end),
            value=torch.nan,
        )
        cache[:, block_ids[b].long()] = keys_so_far.unflatten(2, (block_counts[b], block_size)).transpose(
            1, 2
        )
        block_tables[b, : block_counts[b]] = block_ids[b]
    row_counts = [end - start for _, start, end in sequences]
    row_offsets = torch.tensor([0, *row_counts]).cumsum(0).int()
    lengths = torch.tensor([end for _, _, end in sequences]).int()
    kv = LayerKV(cache, block_tables, torch.empty(0, dtype=torch.int64), window)
    q = torch.cat([sequence.q[start:end] for sequence, start, end in sequences])
    return list(ops.attention(q, kv, row_offsets, lengths, scale=head_dim**-0.5, **options).split(row_counts))


LENGTH = 1150
"""More keys than two chunks of the C++ kernel."""


def check_attention_rows_are_independent(
    ops: Ops, dtype: torch.dtype, shape: tuple[int, int, int], **options: object
) -> None:
    """Check that attention has the same bits in random chunks and batches as in one call for the sequence."""
    torch.manual_seed(0)
    # The reference is slow, so its sequence is short. Its bits depend on the block size, so it has only one.
    is_reference = ops.implementations()["attention"] == "reference"
    length, block_sizes = (100, [32]) if is_reference else (LENGTH, [16, 32, 128])
    sequence, other_sequence = random_sequence(length, *shape, dtype), random_sequence(length, *shape, dtype)
    (full_result,) = attend(ops, [(sequence, 0, length)], 32, **options)

    @FEW_EXAMPLES
    @given(
        boundaries=st.sets(st.integers(1, length - 1), max_size=3),
        other_starts_and_rows=st.lists(st.tuples(st.integers(0, length - 1), st.integers(1, 90)), max_size=3),
        position=st.integers(0, 3),
        block_size=st.sampled_from(block_sizes),
        num_threads=st.sampled_from([1, 2]),
    )
    def check(
        boundaries: set[int],
        other_starts_and_rows: list[tuple[int, int]],
        position: int,
        block_size: int,
        num_threads: int,
    ) -> None:
        torch.set_num_threads(num_threads)
        other_ranges = [
            (other_sequence, start, min(start + rows, length)) for start, rows in other_starts_and_rows
        ]
        for start, end in pairwise([0, *sorted(boundaries), length]):
            batch = [*other_ranges[:position], (sequence, start, end), *other_ranges[position:]]
            actual = attend(ops, batch, block_size, **options)[min(position, len(other_ranges))]
            assert are_same_bits(actual, full_result[start:end])

    check()
    for row in {0, 31, 32, 63, 511, 512, 513, length - 1} & set(range(length)):
        assert are_same_bits(
            attend(ops, [(sequence, row, row + 1)], 32, **options)[0], full_result[row : row + 1]
        )


OPTIONS: dict[str, dict[str, object]] = {
    "": {},
    "window": {"window": 77},
    "wide window": {"window": 600},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": torch.randn(4)},
}


@pytest.mark.matrix(strength=1)
@pytest.mark.usefixtures("_restore_num_threads")
@pytest.mark.parametrize("options", OPTIONS)
def test_attention_is_bit_equal_in_any_chunks(ops: Ops, dtype: torch.dtype, options: str) -> None:
    check_attention_rows_are_independent(ops, dtype, (4, 2, 32), **OPTIONS[options])


@pytest.mark.matrix(strength=1)
@pytest.mark.usefixtures("_restore_num_threads")
@pytest.mark.parametrize("shape", [(3, 3, 24), (2, 1, 80), (5, 1, 40), (8, 1, 64)], ids=str)
def test_attention_of_several_shapes_is_bit_equal_in_any_chunks(
    ops: Ops, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    check_attention_rows_are_independent(ops, dtype, shape)


# ---- the comparison detects faults ----


class SplitsSumsOfFewRows(ReferenceOps):
    """Computes the product of a batch of up to 20 rows as the sum of two halves, which rounds differently."""

    def linear(self, x: Tensor, packed: PackedLinear, *, lora: LoRAInputs | None = None) -> Tensor:
        if len(x) > 20:
            return super().linear(x, packed, lora=lora)
        middle, weight = x.shape[1] // 2, packed.tensors["weight"]
        first_half_sum = multiply_floats(x[:, :middle], weight[:, :middle], packed.bias)
        return first_half_sum + multiply_floats(x[:, middle:], weight[:, middle:], None)


class SplitsKeysByCount(ReferenceOps):
    """Rounds like a kernel that splits the keys by their number instead of by position."""

    def attention(
        self, q: Tensor, kv: LayerKV, row_offsets: Tensor, lengths: Tensor, **options: object
    ) -> Tensor:
        full_result = super().attention(q, kv, row_offsets, lengths, **options)
        attended = torch.empty_like(full_result)
        for b, (start, end) in enumerate(pairwise(row_offsets.tolist())):
            # The rounding of the merged sum depends on the length.
            fraction = 1 / (1 + float(lengths[b] // 2))
            attended[start:end] = full_result[start:end] * fraction + full_result[start:end] * (1 - fraction)
        return attended


class MixesInPreviousRow(ReferenceOps):
    """Adds a part of the previous row to each result."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x, weight, eps) + 1e-3 * x.roll(1, 0)


@pytest.mark.usefixtures("_restore_num_threads")
def test_the_comparison_detects_dependent_rows() -> None:
    for case in ("small", "long rows"):
        with pytest.raises(AssertionError):
            check_rows_are_independent(SplitsSumsOfFewRows(), CASES["linear"][case](torch.float32))
    with pytest.raises(AssertionError):
        check_attention_rows_are_independent(SplitsKeysByCount(), torch.float32, (4, 2, 32))
    with pytest.raises(AssertionError):
        check_rows_are_independent(MixesInPreviousRow(), CASES["rms_norm"][""](torch.float32))
