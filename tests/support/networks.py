"""The modules and weights of a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from penstock.nn import Rotary
from penstock.pipelines import TextGenerationPipeline


def weight_bytes(pipeline: TextGenerationPipeline) -> int:
    """Return the bytes of a network's weights. Weights that share memory count once."""
    model: Any = pipeline.model
    tensors = [item for item in modules_and_weights(model.network) if isinstance(item, torch.Tensor)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def modules_and_weights(module: Any) -> Iterator[Any]:
    """Yield a network, its layers and all their fields, such as weights, but not the fields of a `Rotary`."""
    yield module
    if is_dataclass(module) and not isinstance(module, Rotary):
        children = [getattr(module, field.name) for field in fields(module)]
    elif isinstance(module, Mapping):
        children = list(module.values())
    else:
        children = list(module) if isinstance(module, tuple | list) else []
    for child in children:
        yield from modules_and_weights(child)
