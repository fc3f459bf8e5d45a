"""Reads the task adapters of a checkpoint, stored in tensors next to each adapted weight.

Jina Embeddings v3 (Sturua et al. 2024, arXiv:2409.10173) stores a weight W and the adapters of n tasks as the
parametrization ``W + alpha / r * B[i] @ A[i]``, r being the rank.
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
    """Return the adapter of each task, by its name.

    Args:
        weights: the tensors of the checkpoint.
        layers: the linear layers that can be adapted. Their tensors are ``lora_A [n, r, in]`` and
            ``lora_B [n, out, r]``.
        tables: the embedding tables that can be adapted. Their tensors are ``lora_A [n, V, r]`` and
            ``lora_B [n, r, E]``.
        tasks: the names of the n tasks, in their order in the tensors.
        path: the path of the checkpoint, which lists of loaded adapters show.
        alpha: the numerator of the scale.
        dtype: the type of the activations.

    Raises:
        WeightsError: no layer has adapters, or their number differs from that of the tasks.
    """
    matrices: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in tasks]
    for layer in [*layers, *tables]:
        name = f"{layer}.parametrizations.weight.0.lora_"
        if f"{name}A" not in weights:
            continue
        first, second = (weights.tensor(f"{name}{half}", weights.shape(f"{name}{half}")) for half in "AB")
        if len(first) != len(tasks) or len(second) != len(tasks):
            raise WeightsError(path, f"{name}A holds {len(first)} adapters for {len(tasks)} tasks")
        if layer in tables:
            first, second = first.mT, second.mT
        rank = first.shape[1]
        for of_task, down, up in zip(matrices, first, second, strict=True):
            both = down, up.float() * (alpha / rank)
            first_half, second_half = (
                half.to(dtype).clone(memory_format=torch.contiguous_format) for half in both
            )
            of_task[layer] = first_half, second_half
    if not all(matrices):
        raise WeightsError(path, f"has no adapters for its tasks ({', '.join(tasks)})")
    return {task: Adapter(path, content_digest(own), own) for task, own in zip(tasks, matrices, strict=True)}
