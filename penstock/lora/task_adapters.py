"""Reads the task adapters of a checkpoint, which are stored in tensors next to each adapted weight.

Jina Embeddings v3 (Sturua et al. 2024, arXiv:2409.10173) stores a weight W and the adapters of n tasks as the
parametrization ``W + alpha / r * B[i] @ A[i]`` with rank r.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.lora.adapter import Adapter, content_digest
from penstock.weights import Weights


def read_task_adapters(
    weights: Weights,
    layers: Iterable[str],
    tables: Collection[str],
    tasks: Sequence[str],
    *,
    path: str,
    alpha: float,
    dtype: torch.dtype,
) -> dict[str, Adapter]:
    """Return the task adapters by task name.

    Args:
        weights: the tensors of the checkpoint.
        layers: the linear layers that can be adapted. Their tensors are ``lora_A [n, r, in]`` and
            ``lora_B [n, out, r]``.
        tables: the embedding tables that can be adapted. Their tensors are ``lora_A [n, V, r]`` and
            ``lora_B [n, r, E]``.
        tasks: the names of the n tasks, in their order in the tensors.
        path: the path of the checkpoint, which becomes `Adapter.path`.
        alpha: the numerator of the scale ``alpha / r``.
        dtype: the type of the activations.

    Raises:
        WeightsError: no layer has adapters, or the number of adapters differs from the number of tasks.
    """
    task_matrices: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in tasks]
    for layer in [*layers, *tables]:
        name = f"{layer}.parametrizations.weight.0.lora_"
        if f"{name}A" not in weights:
            continue
        downs, ups = (weights.tensor(f"{name}{letter}", weights.shape(f"{name}{letter}")) for letter in "AB")
        if len(downs) != len(tasks) or len(ups) != len(tasks):
            raise WeightsError(path, f"{name}A holds {len(downs)} adapters for {len(tasks)} tasks")
        if layer in tables:
            downs, ups = downs.mT, ups.mT
        rank = downs.shape[1]
        for matrices, down, up in zip(task_matrices, downs, ups, strict=True):
            scaled_up = up.float() * (alpha / rank)
            matrices[layer] = (
                down.to(dtype).clone(memory_format=torch.contiguous_format),
                scaled_up.to(dtype).clone(memory_format=torch.contiguous_format),
            )
    if not all(task_matrices):
        raise WeightsError(path, f"has no adapters for its tasks ({', '.join(tasks)})")
    return {
        task: Adapter(path, content_digest(matrices), matrices)
        for task, matrices in zip(tasks, task_matrices, strict=True)
    }
