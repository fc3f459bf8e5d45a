"""Compare the CPU kernels with torch, or with the reference kernels, and print medians of the times.

    python benchmarks/cpu_kernels.py [name ...]     # cases whose name contains one of these strings

The two implementations run alternately (A B A B). With OMP_NUM_THREADS=1 the script measures the thread's CPU
time, which depends little on other processes. Compare the ratios: absolute times vary with the load of the
machine. GB/s counts the bytes that an operation must read: weights, or cached keys and values. Each call of a
linear layer uses the next of 2 to 24 weight matrices, so that the weights do not stay in the CPU caches.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.kernels import LayerKV, PackedLinear, SamplingInputs
from penstock.kernels.cpu import cpu_features, isa, load
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.reference import ReferenceOps

SECONDS_PER_CASE = 0.5
MIN_PAIRS = 7


@dataclass(frozen=True)
class Case:
    """An operation of the CPU kernels, and the baseline that it is compared with."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    baseline_name: str
    """The printed name of the baseline."""
    num_bytes: int = 0
    """Bytes that the operation must read; 0 if no speed is printed."""
    flops: float = 0
    """Floating-point operations. If more than 100 per byte, GFLOP/s are printed instead of GB/s."""


def main() -> None:
    """Measure the cases that the command line selects, or all cases, and print a row for each."""
    name_parts = sys.argv[1:]
    print(f"{_cpu_model()}, {torch.get_num_threads()} threads, {' '.join(cpu_features())}")
    print(f"kernels: {isa()}; torch {torch.__version__}; Python {platform.python_version()}")
    print(f"copying 128 MiB: {_copy_speed():.0f} GB/s read and written\n")
    print(f"{'operation':44} {'ours':>10} {'theirs':>10} {'ratio':>6} {'ours':>14}  compared with")
    with torch.inference_mode():
        for case in cases():
            if not name_parts or any(part in case.name for part in name_parts):
                _measure_and_print(case)


def cases() -> Iterator[Case]:
    """Yield all cases."""
    yield from linear_cases()
    yield from attention_cases()
    yield from row_wise_cases()
    yield from sampling_cases()


def linear_cases() -> Iterator[Case]:
    """Yield linear layers, compared with `F.linear` and, from 16 rows, with oneDNN on packed weights."""
    ops = _ops()
    for dtype in (torch.bfloat16, torch.float32):
        for inputs, outputs in ((2048, 2560), (2048, 11264), (5632, 2048), (8192, 2048), (768, 768)):
            count = min(24, max(2, 200_000_000 // (inputs * outputs * dtype.itemsize)))
            weights = [torch.randn(outputs, inputs, dtype=dtype) / inputs**0.5 for _ in range(count)]
            packed = [ops.pack_linear(weight, str(dtype).removeprefix("torch.")) for weight in weights]
            for rows in (1, 2, 4, 8, 16, 32, 256, 1024):
                x = torch.randn(rows, inputs, dtype=dtype)
                for baseline_name, theirs in _torch_linears(x, weights):
                    yield Case(
                        f"linear {str(dtype).removeprefix('torch.')} {inputs} -> {outputs}, T={rows}",
                        partial(_next_linear, ops, x, cycle(packed)),
                        theirs,
                        baseline_name,
                        inputs * outputs * dtype.itemsize,
                        2 * inputs * outputs * rows,
                    )


def _torch_linears(x: Tensor, weights: list[Tensor]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield (name, function) of each torch baseline. Each call of a function uses the next of ``weights``."""
    unpacked = cycle(weights)
    yield "F.linear", lambda: F.linear(x, next(unpacked))
    if torch.backends.mkldnn.is_available() and len(x) >= 16:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        packed = cycle([reorder(weight, len(x)) for weight in weights])
        multiply = torch.ops.mkldnn._linear_pointwise
        yield "oneDNN, packed", lambda: multiply(x, next(packed), None, "none", [], "")


def attention_cases() -> Iterator[Case]:
    """Yield attention over a paged cache.

    The baselines are torch on contiguous tensors and the reference kernels. For an int8 cache, the baseline
    is the same kernel with a bfloat16 cache.
    """
    ops, reference = _ops(), ReferenceOps()
    for heads, kv_heads, dim in ((32, 4, 64), (12, 12, 64), (16, 8, 128), (32, 8, 128), (8, 1, 256)):
        for batch, query_len, context_len in (
            *((1, 1, 128), (1, 1, 512), (1, 1, 4096), (1, 1, 8192), (32, 1, 320)),
            *((1, 1024, 1024), (1, 512, 4096)),
        ):
            for dtype in (torch.bfloat16, torch.float32):
                kv, offsets, context_lens = _paged_cache(batch, query_len, context_len, kv_heads, dim, dtype)
                q = torch.randn(batch * query_len, heads, dim, dtype=dtype)
                sizes = f"{heads}/{kv_heads} heads of {dim}, {batch} x {query_len} of {context_len}"
                contiguous = torch.randn(2, batch, kv_heads, context_len, dim, dtype=dtype)
                yield Case(
                    f"attention {str(dtype).removeprefix('torch.')} {sizes}",
                    partial(ops.attention, q, kv, offsets, context_lens, scale=0.125),
                    partial(_sdpa, q, contiguous, batch, query_len, _mask(query_len, context_len)),
                    "scaled_dot_product_attention on contiguous keys",
                    2 * batch * context_len * kv_heads * dim * dtype.itemsize,
                    4 * batch * heads * dim * query_len * (context_len - (query_len - 1) / 2),
                )
        for context_len in (512, 4096):
            q = torch.randn(1, heads, dim, dtype=torch.bfloat16)
            bf16_kv, offsets, context_lens = _paged_cache(1, 1, context_len, kv_heads, dim, torch.bfloat16)
            scales = torch.full(bf16_kv.cache.shape[:4], 0.02)
            codes = torch.randint_like(bf16_kv.cache, -127, 128, dtype=torch.int8)
            kv = replace(bf16_kv, cache=codes, scales=scales)
            yield Case(
                f"attention int8 {heads}/{kv_heads} heads of {dim}, 1 x 1 of {context_len}",
                partial(ops.attention, q, kv, offsets, context_lens, scale=0.125),
                partial(ops.attention, q, bf16_kv, offsets, context_lens, scale=0.125),
                "the same with a bfloat16 cache",
                2 * context_len * kv_heads * dim,
            )
        kv, offsets, context_lens = _paged_cache(1, 1, 512, kv_heads, dim, torch.bfloat16)
        q = torch.randn(1, heads, dim, dtype=torch.bfloat16)
        yield Case(
            f"attention bfloat16 {heads}/{kv_heads} heads of {dim}, 1 x 1 of 512",
            partial(ops.attention, q, kv, offsets, context_lens, scale=0.125),
            partial(reference.attention, q, kv, offsets, context_lens, scale=0.125),
            "reference",
        )


def row_wise_cases() -> Iterator[Case]:
    """Yield norms, activations, rotary embeddings and writes to the KV cache."""
    ops, reference = _ops(), ReferenceOps()
    for count in (1, 32, 1024):
        x, residual = torch.randn(2, count, 2048).bfloat16()
        weight = torch.ones(2048, dtype=torch.bfloat16)
        gates = torch.randn(count, 11264).bfloat16()
        q, k = torch.randn(count, 32, 64).bfloat16(), torch.randn(count, 4, 64).bfloat16()
        cos, sin = torch.randn(2, count, 32)
        kv, _, _ = _paged_cache(1, count, 2048, 4, 64, torch.bfloat16)
        v = torch.randn(count, 4, 64).bfloat16()
        arguments: dict[str, tuple[object, ...]] = {
            "rms_norm": (x, weight, 1e-5),
            "add_rms_norm": (x, residual, weight, 1e-5),
            "gated_activation": (gates, "silu"),
            "rotary": (q, k, cos, sin),
            "store_kv": (k, v, kv),
        }
        for name, values in arguments.items():
            ours, theirs = (partial(getattr(back_end, name), *values) for back_end in (ops, reference))
            yield Case(f"{name}, T={count}", ours, theirs, "reference")
        yield Case(
            f"rms_norm, T={count}",
            partial(ops.rms_norm, x, weight, 1e-5),
            partial(F.rms_norm, x, (2048,), weight, 1e-5),
            "F.rms_norm",
        )


def sampling_cases() -> Iterator[Case]:
    """Yield the sampling of one token per row."""
    ops, reference = _ops(), ReferenceOps()
    for count, vocabulary in ((1, 32000), (1, 151936), (32, 32000)):
        logits = 3 * torch.randn(count, vocabulary)
        for settings_name, temperature, top_k, top_p in (
            ("greedy", 0.0, 0, 1.0),
            ("all tokens", 1.0, 0, 1.0),
            ("top_p 0.9", 0.7, 0, 0.9),
            ("top_k 50, top_p 0.9", 0.7, 50, 0.9),
        ):
            inputs = SamplingInputs(
                torch.full((count,), temperature),
                torch.full((count,), top_k),
                torch.full((count,), top_p),
                torch.zeros(count),
                torch.rand(count, dtype=torch.float64),
            )
            yield Case(
                f"sample {count} x {vocabulary}, {settings_name}",
                partial(ops.sample, logits, inputs),
                partial(reference.sample, logits, inputs),
                "reference",
            )


def _ops() -> CpuOps:
    ops = load()
    if ops is None:
        raise SystemExit("the C++ kernels are not built")
    return ops


def _paged_cache(
    batch: int, query_len: int, context_len: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[LayerKV, Tensor, Tensor]:
    """Return one layer of a random paged KV cache, and the query offsets and context lengths of a batch.

    A block has 32 tokens.
    """
    blocks = -(-context_len // 32)
    cache = torch.randn(2, batch * blocks + 1, kv_heads, 32, dim, dtype=dtype)
    tables = (torch.randperm(batch * blocks) + 1).view(batch, blocks).int()
    positions = torch.arange(context_len - query_len, context_len)
    slots = tables[:, positions // 32].long() * 32 + positions % 32
    offsets = torch.arange(0, batch * query_len + 1, query_len).int()
    return LayerKV(cache, tables, slots.flatten()), offsets, torch.full((batch,), context_len).int()


def _next_linear(ops: CpuOps, x: Tensor, weights: Iterator[PackedLinear]) -> Tensor:
    return ops.linear(x, next(weights))


def _sdpa(q: Tensor, keys_and_values: Tensor, batch: int, query_len: int, mask: Tensor | None) -> Tensor:
    keys, values = keys_and_values
    queries = q.view(batch, query_len, *q.shape[1:]).transpose(1, 2)
    options: dict[str, Any] = {"scale": 0.125, "enable_gqa": queries.shape[1] != keys.shape[1]}
    if mask is None:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=query_len > 1, **options)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, **options)


def _mask(query_len: int, context_len: int) -> Tensor | None:  # [query_len, context_len]
    """Return the causal mask of the last ``query_len`` positions, or None if ``_sdpa`` needs no mask."""
    if query_len in (1, context_len):
        return None
    return torch.ones(query_len, context_len, dtype=torch.bool).tril(context_len - query_len)


def _measure_and_print(case: Case) -> None:
    times: tuple[list[float], list[float]] = ([], [])
    calls = (case.ours, case.theirs)
    repeats = [max(1, int(0.002 / _seconds_per_call(call, 3))) for call in calls]
    end = time.perf_counter() + SECONDS_PER_CASE
    while len(times[0]) < MIN_PAIRS or time.perf_counter() < end:
        for side, call in enumerate(calls):
            times[side].append(_seconds_per_call(call, repeats[side]))
    ours, theirs = (statistics.median(side) for side in times)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    speed = ""
    if case.flops > 100 * case.num_bytes:
        speed = f"{case.flops / ours / 1e9:.0f} GFLOP/s"
    elif case.num_bytes:
        speed = f"{case.num_bytes / ours / 1e9:.1f} GB/s"
    print(
        f"{case.name:44} {1e6 * ours:8.1f}us {1e6 * theirs:8.1f}us {ratio:6.2f} {speed:>14}  "
        f"{case.baseline_name}",
        flush=True,
    )


def _seconds_per_call(call: Callable[[], object], repeats: int) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def _copy_speed() -> float:
    """Return the GB/s of copying 128 MiB. Counts the bytes read and the bytes written."""
    source = torch.ones(32 << 20)
    target = torch.empty_like(source)
    best = min(_seconds_per_call(lambda: target.copy_(source), 1) for _ in range(5))
    return 2 * source.nbytes / best / 1e9


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


if __name__ == "__main__":
    main()
