"""The Triton kernels compile on a machine without a GPU, with the types and sizes of real launches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.kernels import (
    ENCODINGS,
    ClampedSwiGLU,
    LayerKV,
    LayerState,
    LinearSlice,
    LoRAInputs,
    PackedExperts,
    SamplingInputs,
)
from penstock.kernels.spans import ImageSpans

triton = pytest.importorskip("triton")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

MODULES = ("attention", "codes", "lookups", "rows", "recurrent", "products", "linear", "ops")
LAUNCH_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
CAPABILITY = int(os.environ.get("COMPUTE_CAPABILITY", "90"))


def compile_launch(program: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Replace `launch`: compile the kernel for these arguments without running it.

    Check that the shared memory of the kernel is at most 227 KiB.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    if options.pop("is_dependent", False):
        options |= {"PDL": CAPABILITY >= 90, "launch_pdl": CAPABILITY >= 90}
    launch_options = {name: options[name] for name in LAUNCH_OPTIONS if name in options} | {
        "enable_fp_fusion": False
    }
    constants = {name: value for name, value in options.items() if name not in LAUNCH_OPTIONS}
    signature = {}
    for name, value in zip(program.arg_names, arguments, strict=False):
        signature[name] = "constexpr" if isinstance(value, int) and value == 1 else mangle_type(value)
        if signature[name] == "constexpr":
            constants[name] = value
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=program, signature=signature, constexprs=constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=launch_options)
    assert kernel.metadata.shared <= 227 * 1024
    compiled_kernels.append(program.__name__)


compiled_kernels: list[str] = []


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from importlib import import_module

    for name in MODULES:
        monkeypatch.setattr(import_module(f"penstock.kernels.cuda.{name}"), "launch", compile_launch)
    compiled_kernels.clear()
    yield import_module("penstock.kernels.cuda.ops").CudaOps()
    assert compiled_kernels


parametrize_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@parametrize_dtypes
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "num_rows", "num_sequences"),
    [(16, 8, 128, 1, 1), (4, 1, 64, 512, 4), (8, 8, 80, 70, 2)],
)
def test_attention_kernels_compile(
    ops: Any, dtype: torch.dtype, is_deterministic: bool, num_heads: int, num_kv_heads: int, head_dim: int,
    num_rows: int, num_sequences: int,
) -> None:  # fmt: skip
    if is_deterministic:
        ops.require_determinism()
    q, row_offsets = (
        torch.zeros(num_rows, num_heads, head_dim, dtype=dtype),
        torch.arange(num_sequences + 1).int(),
    )
    options: dict[str, Any] = {}
    if head_dim == 80:
        spans = ImageSpans(torch.zeros(num_rows, 2).int(), row_offsets, row_offsets[1:])
        options = {"soft_cap": 2.0, "sinks": torch.zeros(num_heads), "spans": spans}
    for cache_dtype in (dtype, torch.int8, torch.float8_e4m3fn):
        kv = LayerKV(
            torch.zeros(2, 3, num_kv_heads, 32, head_dim, dtype=cache_dtype),
            torch.zeros(num_sequences, 128, dtype=torch.int32),
            torch.zeros(num_rows, dtype=torch.int64),
            16 if head_dim == 64 else None,
            torch.zeros(2, 3, num_kv_heads, 32) if cache_dtype != dtype else None,
        )
        if cache_dtype == torch.float8_e4m3fn and num_rows == 1:
            scales = torch.ones(2, 1, num_kv_heads, 1).expand(2, 3, num_kv_heads, 32)
            kv = replace(kv, scales=scales, has_fixed_scales=True)
        ops.attention(q, kv, row_offsets, row_offsets[1:].contiguous(), scale=0.1, **options)
        ops.store_kv(q[:, :num_kv_heads], q[:, :num_kv_heads], kv)
    keys_and_values = q[:, :num_kv_heads].contiguous()
    ops.encoder_attention(
        q, keys_and_values, keys_and_values, row_offsets, scale=0.1, window=3, bias=torch.zeros(num_heads, 9)
    )
    ops.rotary(q, keys_and_values, torch.zeros(num_rows, 32), torch.zeros(num_rows, 32))


@parametrize_dtypes
def test_row_kernels_compile(ops: Any, dtype: torch.dtype) -> None:
    x, weight = torch.zeros(3, 256, dtype=dtype), torch.zeros(256, dtype=dtype)
    operations: list[Callable[[], object]] = [
        lambda: ops.rms_norm(x, weight.float(), 1e-5),
        lambda: ops.rms_norm(x.view(3, 4, 64), weight[:64], 1e-5),
        lambda: ops.add_rms_norm(x, x, weight, 1e-5),
        lambda: ops.add_layer_norm(x, x, weight, weight, 1e-5),
        lambda: ops.soft_cap(x, 3.0),
        lambda: ops.clamped_swiglu(x, ClampedSwiGLU(1.0, 7.0)),
        lambda: ops.route(x, 4, "all_normed"),
        lambda: ops.route(x, 4, "all"),
    ]
    for operation in operations:
        operation()
    for activation in ("silu", "gelu", "gelu_tanh", "relu"):
        ops.activation(x, activation)
        ops.gated_activation(x, activation)


@parametrize_dtypes
def test_recurrent_kernels_compile(ops: Any, dtype: torch.dtype) -> None:
    inputs, recurrent = torch.zeros(3, 3, 1024, dtype=dtype), torch.zeros(3, 4, 128, 128)
    state = LayerState(inputs, recurrent, torch.zeros(2).long(), torch.zeros(8).long())
    row_offsets, lengths = torch.zeros(3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    qkv = ops.short_convolution(
        torch.zeros(5, 1024, dtype=dtype), torch.zeros(4, 1024), state, row_offsets, lengths
    )
    out = ops.gated_delta_rule(
        qkv, torch.zeros(5, 8, dtype=dtype), torch.zeros(2, 4), state, row_offsets, lengths
    )
    for function in ("sigmoid", "silu"):
        ops.apply_gate(out, out, function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_lookup_kernels_compile(ops: Any, dtype: torch.dtype) -> None:
    table, rows = torch.zeros(9, 257, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    ops.embedding(rows, table)
    ops.put_rows(table, rows, table[:3])
    ops.rope_rows(rows, torch.zeros(9, 64), torch.zeros(9, 64))


@parametrize_dtypes
def test_sampling_kernels_compile(ops: Any, dtype: torch.dtype) -> None:
    row_values = torch.ones(3)
    sampling_inputs = SamplingInputs(
        row_values, torch.zeros(3).long(), row_values, row_values, torch.zeros(3).double()
    )
    for mask in (None, torch.zeros(3, 1001).int()):
        ops.sample(torch.zeros(3, 32003, dtype=dtype), sampling_inputs, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_product_kernels_compile(ops: Any, dtype: torch.dtype, encoding: str, is_deterministic: bool) -> None:
    if is_deterministic:
        ops.require_determinism()
    slices = [LinearSlice("a", 0, 96)]
    packed_weight = ops.pack_linear(torch.randn(96, 256), encoding, bias=torch.zeros(96), slices=slices)
    down = ops.pack_linear(torch.randn(256, 96), encoding)
    for num_rows in (1, 40, 100):
        ops.linear(torch.zeros(num_rows, 256, dtype=dtype), packed_weight)
    experts = PackedExperts((packed_weight, packed_weight), (down, down))
    ids = torch.zeros(40, 2).long()
    ops.experts(torch.zeros(40, 256, dtype=dtype), experts, torch.ones(40, 2), ids, ClampedSwiGLU(1.0, 7.0))
    adapter_matrices = torch.zeros(2, 8, 256, dtype=dtype), torch.zeros(2, 96, 8, dtype=dtype)
    lora = LoRAInputs(torch.zeros(3).long(), {"a": adapter_matrices}, {"a": torch.ones(2).long()})
    ops.linear(torch.zeros(3, 256, dtype=dtype), packed_weight, lora=lora)
