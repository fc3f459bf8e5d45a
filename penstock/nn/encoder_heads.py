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
    """The layer before the activation; None if the head has only the output layer."""
    activation: Literal["tanh"] | Activation | None = "tanh"
    output: str = "classifier.out_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLMNames:
    """The tensor names of a masked language model's head. The defaults are those of RoBERTa."""

    dense: str = "lm_head.dense"
    norm: str = "lm_head.layer_norm"
    decoder: str = "lm_head.decoder"
    """The output layer. Its weight is absent if the checkpoint ties it to the token table."""
    bias: str = "lm_head.bias"
    """The full name of the bias of the output layer."""


def head_activation(name: Literal["tanh"] | Activation | None) -> HeadActivation | None:
    """Return the function of a head's activation; None without an activation."""
    if name is None or name == "tanh":
        return None if name is None else tanh
    activation: Activation = name
    return lambda x, step: step.ops.activation(x, activation)


def tanh(x: Tensor, step: StepInputs) -> Tensor:
    """Return the hyperbolic tangent, computed in float32 and rounded to the type of ``x``."""
    return torch.tanh(x.float()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """Maps one pooled row per sequence to the logits of the labels: ``[B, E] -> [B, labels]``.

    Computes ``output(norm(activation(dense(x))))``. Layers that a family does not have are None.
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
class MaskedLMHead:
    """Maps hidden states to logits over the vocabulary: ``[T, E] -> [T, V]``."""

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
    """Read a classification head without a norm. ``bias`` is whether its layers have biases."""
    dense = None if names.dense is None else plain_linear(load, names.dense, hidden, hidden, bias=bias)
    output = plain_linear(load, names.output, labels, hidden, bias=bias)
    return ClassificationHead(output, dense, head_activation(names.activation))


def load_masked_lm_head(
    load: Loader,
    names: MaskedLMNames,
    tokens: Tensor,  # [V, E]
    activation: Activation,
    norm_eps: float,
) -> MaskedLMHead:
    """Read the head of a masked language model. Uses the token table if no output layer is stored."""
    vocab_size, hidden = tokens.shape
    is_tied = f"{names.decoder}.weight" not in load.source
    weight = tokens if is_tied else load.source.tensor(f"{names.decoder}.weight", (vocab_size, hidden))
    bias = load.source.tensor(names.bias, (vocab_size,))
    return MaskedLMHead(
        plain_linear(load, names.dense, hidden, hidden),
        activation,
        load.layer_norm(names.norm, hidden, norm_eps),
        load.pack(weight, {names.decoder: vocab_size}, bias=bias),
    )


def num_labels(config: ConfigValues) -> int:
    """Return the number of labels of a classification head.

    This is the size of ``id2label`` if present, otherwise ``num_labels``, by default 2.

    Raises:
        ConfigError: ``id2label`` is empty or has no length.
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
    """Read a small linear layer of a head, without quantizing it."""
    weight = load.source.tensor(f"{name}.weight", (out_features, in_features))
    bias_tensor = load.source.tensor(f"{name}.bias", (out_features,)) if bias else None
    return load.pack(weight, {name: out_features}, bias=bias_tensor, is_unquantized=True)
