"""The modules and weights of a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from penstock.nn import Rotary
from penstock.pipelines import TextGenerationPipeline


def held_bytes(pipeline: TextGenerationPipeline) -> int:
    """Return the bytes of a network's weights. Weights that share memory count once."""
    model: Any = pipeline.model
    tensors = [one for one in parts_of(model.network) if isinstance(one, torch.Tensor)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def parts_of(one: Any) -> Iterator[Any]:
    """Yield a network, its layers and their weights, without the tables of its rotary embedding."""
    yield one
    if is_dataclass(one) and not isinstance(one, Rotary):
        children = [getattr(one, each.name) for each in fields(one)]
    elif isinstance(one, Mapping):
        children = list(one.values())
    else:
        children = list(one) if isinstance(one, tuple | list) else []
    for child in children:
        yield from parts_of(child)
