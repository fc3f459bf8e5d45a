"""Heads of encoders: sequence classification, and logits over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import StepInputs
from penstock.nn.config_values import ConfigValues
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader
from penstock.nn.norm import LayerNorm

HeadActivation = Callable[[Tensor, StepInputs], Tensor]


def tanh(x: Tensor, step: StepInputs) -> Tensor:
    """Return the hyperbolic tangent, computed in float32, in x's type."""
    return torch.tanh(x.float()).to(x.dtype)


def relu(x: Tensor, step: StepInputs) -> Tensor:
    """Return ``max(x, 0)``."""
    return step.ops.activation(x, "relu")


def gelu(x: Tensor, step: StepInputs) -> Tensor:
    """Return the exact GELU."""
    return step.ops.activation(x, "gelu")


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """Logits of the labels from one pooled row per sequence: ``[B, E] -> [B, labels]``.

    Computes ``output(norm(activation(dense(x))))``; a step that the family lacks is None.
    """

    output: Linear
    dense: Linear | None = None
    activation: HeadActivation | None = None
    norm: LayerNorm | None = None

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        if self.dense is not None:
            x = self.dense(x, step)
        if self.activation is not None:
            x = self.activation(x, step)
        if self.norm is not None:
            x = self.norm(x, step)
        return self.output(x, step)


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    """Logits over the vocabulary of a masked language model: ``[T, E] -> [T, V]``."""

    dense: Linear
    activation: HeadActivation
    norm: LayerNorm
    decoder: Linear

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        return self.decoder(self.norm(self.activation(self.dense(x, step), step), step), step)


def num_labels(config: ConfigValues) -> int:
    """Return the number of labels of a classification head: the size of ``id2label``, else 2.

    Raises:
        ConfigError: ``id2label`` is empty or not an object.
    """
    labels = config.get("id2label")
    if labels is None:
        return config.integer("num_labels", 2)
    if not hasattr(labels, "__len__") or len(labels) < 1:
        raise ConfigError("id2label", f"must map at least one index to a label, was {labels!r}")
    return len(labels)


def plain_linear(
    load: Loader, name: str, out_features: int, in_features: int, *, bias: bool = True
) -> Linear:
    """Read a small layer of a head; it stays in the type of the activations."""
    weight = load.source.tensor(f"{name}.weight", (out_features, in_features))
    offset = load.source.tensor(f"{name}.bias", (out_features,)) if bias else None
    return load.pack(weight, {name: out_features}, bias=offset, plain=True)
