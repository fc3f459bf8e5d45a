"""Pooling of the hidden states of one text to a vector, and the dense layers that follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.dtype import DType
from penstock.errors import CheckpointError
from penstock.kernels import Ops, PackedLinear
from penstock.pipelines.core import PoolingType
from penstock.text.sentence_transformers import DenseModule
from penstock.weights.pickled import open_weights

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}


def pool(hidden: Tensor, poolings: Sequence[PoolingType], num_unpooled: int = 0) -> Tensor:
    """Return the pooled vector of one text, ``[n, E] -> [E * len(poolings)]``, in float32.

    Args:
        hidden: the hidden states of the text, special tokens included.
        poolings: the kinds of pooling, whose results are concatenated.
        num_unpooled: number of leading rows to skip, such as the rows of a prompt.
    """
    rows = hidden.float()
    pooled = [_POOLINGS[kind](rows, rows[num_unpooled:]) for kind in poolings]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled)


def _weighted_mean(rows: Tensor, kept_rows: Tensor) -> Tensor:
    """Return the mean of the rows that are not skipped, weighted by position 1, 2, 3, ... in the text.

    Source: Muennighoff 2022, arXiv:2202.08904.
    """
    weights = torch.arange(len(rows) - len(kept_rows) + 1, len(rows) + 1, device=rows.device).float()
    return (kept_rows * weights[:, None]).sum(0) / weights.sum()


# Each function takes all rows of a text, and the rows that pooling does not skip.
_POOLINGS: Mapping[PoolingType, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda rows, kept_rows: kept_rows[0],
    "mean": lambda rows, kept_rows: kept_rows.mean(0),
    "max": lambda rows, kept_rows: kept_rows.amax(0),
    "mean_sqrt_len": lambda rows, kept_rows: kept_rows.sum(0) / len(kept_rows) ** 0.5,
    "weighted_mean": _weighted_mean,
    "last_token": lambda rows, kept_rows: kept_rows[-1],
}


@dataclass(frozen=True)
class Dense:
    """A linear layer with an activation, in float32: ``[B, in] -> [B, out]``."""

    packed: PackedLinear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        return self.activation(ops.linear(x, self.packed))


def load_dense(module: DenseModule, ops: Ops, device: torch.device) -> Dense:
    """Read a dense module of the sentence-transformers layout.

    Raises:
        CheckpointError: weights are missing, misshapen or unexpected, or the activation is unknown.
    """
    if module.activation not in _ACTIVATIONS:
        supported_activations = ", ".join(_ACTIVATIONS)
        raise CheckpointError(
            module.path,
            f"activation {module.activation!r} is not supported: use one of {supported_activations}",
        )
    weights = open_weights(module.path)
    weight = weights.tensor("linear.weight", (module.out_features, module.in_features)).float().to(device)
    bias = None
    if module.bias:
        bias = weights.tensor("linear.bias", (module.out_features,)).float().to(device)
    weights.finish(())
    packed = ops.pack_linear(weight, DType.float32.value, bias=bias)
    return Dense(packed, _ACTIVATIONS[module.activation])
