"""Back end for NVIDIA GPUs: Triton programs, and matrix products of cuBLAS, called through torch.

>>> ops = load()  # None without a GPU or without triton
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.kernels.backend import Backend, DefaultSizes

if TYPE_CHECKING:
    import torch

    from penstock.kernels.cuda.graphs import CudaGraphCompiler
    from penstock.kernels.cuda.memory import CudaMemory
    from penstock.kernels.cuda.ops import CudaOps
    from penstock.kernels.cuda.queue import CudaQueue
    from penstock.kernels.ops import Ops

__all__ = ["BACKEND", "load", "variants"]


def load() -> CudaOps | None:
    """Return the operations for the GPUs of this machine; None if `can_run_on_gpu` returns False."""
    from penstock.kernels.cuda.availability import can_run_on_gpu

    if not can_run_on_gpu():
        return None
    from penstock.kernels.cuda.ops import CudaOps

    return CudaOps()


def variants() -> list[CudaOps]:
    """Return one `CudaOps`; none if it can run neither on a GPU nor in Triton's interpreter. For tests."""
    from penstock.kernels.cuda.availability import can_run_on_gpu, is_interpreted

    if not is_interpreted() and not can_run_on_gpu():
        return []
    from penstock.kernels.cuda.ops import CudaOps

    return [CudaOps()]


def _graphs(ops: Ops) -> CudaGraphCompiler | None:
    from penstock.kernels.cuda.graphs import make_graph_compiler

    return make_graph_compiler(ops)


def _queue(ops: Ops) -> CudaQueue | None:
    from penstock.kernels.cuda.queue import make_queue

    return make_queue(ops)


def _memory(ops: Ops, device: torch.device) -> CudaMemory | None:
    from penstock.kernels.cuda.memory import make_device_memory

    return make_device_memory(ops, device)


def _row_bytes(bits: int, in_features: int) -> int:
    """Return the bytes of a weight row: nibbles (`kernels.nibbles`) for up to 4 bits, else whole bytes."""
    return -(-in_features // 64) * 32 if bits <= 4 else in_features * -(-bits // 8)


BACKEND = Backend(
    name="cuda",
    default_sizes={"gpu": DefaultSizes(max_batch_size=256, step_tokens=8192)},
    load=load,
    variants=variants,
    priority=10,
    row_bytes=_row_bytes,
    graphs=_graphs,
    queue=_queue,
    memory=_memory,
)
