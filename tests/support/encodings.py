"""A weight encoding for tests."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.dtype import DType
from penstock.kernels import LinearEncoding
from penstock.kernels.linear import multiply_floats


class HalvedEncoding(LinearEncoding):
    """A lossless encoding that stores half of each weight and a scale of two.

    The result is wrong if a layer uses the stored tensor without unpacking it.

    Args:
        name: name of the encoding.
        bytes_per_weight: the result of `num_bytes` for one weight.
    """

    compute_dtype = DType.float32
    storage_dtype = DType.float32
    bits = 32

    def __init__(self, name: str = "halved", bytes_per_weight: float = 4) -> None:
        self.name = name
        self._bytes_per_weight = bytes_per_weight

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return int(self._bytes_per_weight * out_features * in_features)

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        scale = torch.full((len(weight), 1), 2.0, device=weight.device)
        return {"weight": weight.float() / 2, "scale": scale}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"] * tensors["scale"]

    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        return multiply_floats(x, self.unpack(tensors), bias)
