"""Measure the CUDA kernels: matrix products (GEMM) in all weight encodings, attention, sampling.

    python benchmarks/gpu_kernels.py products --encodings bfloat16 int4 --rows 1 16
    python benchmarks/gpu_kernels.py attention sampling

Each time is the median over replays of a CUDA graph (`triton.testing.do_bench_cudagraph`). TB/s counts the
bytes of the weights or of the KV cache, TF/s the floating-point operations. Products of at most 64 rows have
TB/s, larger products TF/s, attention both, and sampling neither. The last number of each product is its
relative error: the norm of the difference from the float32 product of the unpacked weights, divided by the
norm of the float32 product.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from triton.testing import do_bench_cudagraph

from penstock.kernels import ENCODINGS, LayerKV, Ops, SamplingInputs, unpack_linear
from penstock.kernels.cuda import load

LAYER_SIZES = ((2048, 2048), (28672, 4096), (4096, 14336))
"""(outputs, inputs) of an attention projection of a 1B model, and of the MLP layers of an 8B model."""
ATTENTION_SIZES = ((1, 1, 200), (1, 1, 2000), (1, 1, 32000), (64, 1, 600), (256, 1, 600), (4, 2000, 2000))
"""(sequences, query tokens per sequence, keys per sequence)."""
VOCAB_SIZE = 151936


def main() -> None:
    """Run the measurements of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", nargs="+", choices=["products", "attention", "sampling"])
    parser.add_argument("--encodings", nargs="+", choices=list(ENCODINGS), default=list(ENCODINGS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 2048])
    arguments = parser.parse_args()
    ops = load()
    if ops is None:
        parser.error("torch finds no GPU, or triton is not installed")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    torch.manual_seed(0)
    for work in arguments.work:
        if work == "products":
            measure_products(ops, arguments.encodings, arguments.rows)
        else:
            {"attention": measure_attention, "sampling": measure_sampling}[work](ops)


def microseconds(run: Callable[[], object]) -> float:
    """Return the median time of a call in microseconds."""
    return 1e3 * float(do_bench_cudagraph(run, rep=30, return_mode="median"))


def measure_products(ops: Ops, encodings: list[str], row_counts: list[int]) -> None:
    """Measure the product of bfloat16 rows ``[rows, inputs]`` and weights ``[outputs, inputs]``."""
    for encoding in encodings:
        for outputs, inputs in LAYER_SIZES:
            packed = ops.pack_linear(torch.randn(outputs, inputs) / inputs**0.5, encoding)
            packed = replace(packed, tensors={name: tensor.cuda() for name, tensor in packed.tensors.items()})
            exact_weight = unpack_linear(packed).float()
            num_bytes = sum(tensor.nbytes for tensor in packed.tensors.values())
            cells = [f"{encoding:9} {outputs:5} x {inputs:<5} {num_bytes / 2**20:6.1f} MiB"]
            for rows in row_counts:
                x = torch.randn(rows, inputs, device="cuda").bfloat16()
                expected = x.float() @ exact_weight.T
                error = float((ops.linear(x, packed).float() - expected).norm() / expected.norm())
                time = microseconds(lambda x=x, packed=packed: ops.linear(x, packed))  # type: ignore[misc]
                rate, unit = num_bytes / time / 1e6, "TB/s"
                if rows > 64:
                    rate, unit = 2 * rows * outputs * inputs / time / 1e6, "TF/s"
                cells.append(f"{rows}: {time:7.1f} us {rate:6.2f} {unit} {error:.0e}")
            print(" | ".join(cells), flush=True)


def measure_attention(ops: Ops) -> None:
    """Measure attention with 32 query heads, 8 KV heads and head dimension 128 over a paged cache."""
    heads, kv_heads, dim, block_size = 32, 8, 128, 16
    for cache_type in (torch.bfloat16, torch.float8_e4m3fn):
        for sequences, rows, length in ATTENTION_SIZES:
            num_blocks = -(-length // block_size)
            cache = torch.randn(2, sequences * num_blocks, kv_heads, block_size, dim, device="cuda")
            cache = cache.to(cache_type)
            scales = None
            if cache_type != torch.bfloat16:
                scales = torch.ones(cache.shape[:-1], device="cuda")
            tables = torch.randperm(sequences * num_blocks, device="cuda").int().view(sequences, num_blocks)
            slots = torch.zeros(sequences * rows, dtype=torch.int64, device="cuda")
            kv = LayerKV(cache, tables, slots, None, scales)
            q = torch.randn(sequences * rows, heads, dim, device="cuda").bfloat16()
            offsets = (torch.arange(sequences + 1, device="cuda") * rows).int()
            lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")
            time = microseconds(
                lambda q=q, kv=kv, o=offsets, n=lengths: ops.attention(q, kv, o, n, scale=dim**-0.5)  # type: ignore[misc]
            )
            num_bytes = cache.nbytes + (0 if scales is None else scales.nbytes)
            pairs = sequences * (rows * length - rows * (rows - 1) // 2)
            print(
                f"{str(cache_type)[6:]:14} {sequences:3} x {rows:4} rows, {length:5} keys: {time:8.1f} us "
                f"{num_bytes / time / 1e6:5.2f} TB/s {4 * pairs * heads * dim / time / 1e6:6.1f} TF/s",
                flush=True,
            )


def measure_sampling(ops: Ops) -> None:
    """Measure the sampling of one token per row, from peaked and from flat distributions."""
    sampling_settings = {
        "greedy": (0.0, 0, 1.0),
        "temperature": (0.8, 0, 1.0),
        "top_k 40": (0.8, 40, 1.0),
        "top_p 0.9": (0.8, 0, 0.9),
        "top_k 1000, top_p 0.95": (0.8, 1000, 0.95),
    }
    for distribution, logit_deviation in (("peaked", 4.0), ("flat", 1.0)):
        for name, (temperature, top_k, top_p) in sampling_settings.items():
            cells = [f"{distribution:6} {name:23}"]
            for rows in (1, 64, 256):
                logits = (logit_deviation * torch.randn(rows, VOCAB_SIZE, device="cuda")).bfloat16()
                inputs = SamplingInputs(
                    torch.full((rows,), temperature, device="cuda"),
                    torch.full((rows,), top_k, device="cuda"),
                    torch.full((rows,), top_p, device="cuda"),
                    torch.zeros(rows, device="cuda"),
                    torch.rand(rows, dtype=torch.float64, device="cuda"),
                )
                time = microseconds(lambda x=logits, s=inputs: ops.sample(x, s))  # type: ignore[misc]
                cells.append(f"{rows}: {time:8.1f} us")
            print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
