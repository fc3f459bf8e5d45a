"""Heads of encoders: sequence classification, and logits over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import Activation, StepInputs
from penstock.nn.config_values import ConfigValues
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader
from penstock.nn.norm import LayerNorm

HeadActivation = Callable[[Tensor, StepInputs], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierNames:
    """The tensor names of a classification head, and its activation. The defaults are those of RoBERTa."""

    dense: str | None = "classifier.dense"
    activation: Literal["tanh"] | Activation | None = "tanh"
    output: str = "classifier.out_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyNames:
    """The tensor names of a masked language model's head. The defaults are those of RoBERTa."""

    dense: str = "lm_head.dense"
    norm: str = "lm_head.layer_norm"
    decoder: str = "lm_head.decoder"
    """The output layer. Its weight is absent if the checkpoint ties it to the token table."""
    bias: str = "lm_head.bias"
    """The full name of the bias of the output layer."""


def head_activation(name: Literal["tanh"] | Activation | None) -> HeadActivation | None:
    """Return the function of an activation in a head."""
    if name is None or name == "tanh":
        return None if name is None else tanh
    kind: Activation = name
    return lambda x, step: step.ops.activation(x, kind)


def tanh(x: Tensor, step: StepInputs) -> Tensor:
    """Return the hyperbolic tangent, computed in float32 and rounded to the type of ``x``."""
    return torch.tanh(x.float()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """Logits of the labels from one pooled row per sequence: ``[B, E] -> [B, labels]``.

    Computes ``output(norm(activation(dense(x))))``. Parts that a family does not have are None.
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
    activation: Activation
    norm: LayerNorm
    decoder: Linear

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        x = step.ops.activation(self.dense(x, step), self.activation)
        return self.decoder(self.norm(x, step), step)


def load_classifier(
    load: Loader, names: ClassifierNames, labels: int, hidden: int, *, bias: bool = True
) -> ClassificationHead:
    """Read a classification head without a norm. Its layers have biases if ``bias`` is true."""
    dense = None if names.dense is None else plain_linear(load, names.dense, hidden, hidden, bias=bias)
    output = plain_linear(load, names.output, labels, hidden, bias=bias)
    return ClassificationHead(output, dense, head_activation(names.activation))


def load_vocabulary_head(
    load: Loader,
    names: VocabularyNames,
    tokens: Tensor,  # [V, E]
    activation: Activation,
    norm_eps: float,
) -> VocabularyHead:
    """Read the head of a masked language model. The token table is the output layer if none is stored."""
    vocabulary, hidden = tokens.shape
    is_tied = f"{names.decoder}.weight" not in load.source
    weight = tokens if is_tied else load.source.tensor(f"{names.decoder}.weight", (vocabulary, hidden))
    bias = load.source.tensor(names.bias, (vocabulary,))
    return VocabularyHead(
        plain_linear(load, names.dense, hidden, hidden),
        activation,
        load.layer_norm(names.norm, hidden, norm_eps),
        load.pack(weight, {names.decoder: vocabulary}, bias=bias),
    )


def num_labels(config: ConfigValues) -> int:
    """Return the number of labels of a classification head: ``id2label``'s size, else ``num_labels``, else 2.

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
    """Read a small linear layer of a head. It is not quantized."""
    weight = load.source.tensor(f"{name}.weight", (out_features, in_features))
    offset = load.source.tensor(f"{name}.bias", (out_features,)) if bias else None
    return load.pack(weight, {name: out_features}, bias=offset, plain=True)
