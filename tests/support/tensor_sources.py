"""A source of tensors for `penstock.nn.Loader` that holds float tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.kernels import Ops
from penstock.nn import Loader


class FloatTensors:
    """Float tensors by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self.tensors[name].shape == shape
        return self.tensors[name]

    def read_linear(
        self, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        return None, {"weight": self.tensor(name, shape)}

    def stored_encoding(self, name: str) -> str | None:
        return None

    def input_order(self, name: str) -> bytes:
        return b""

    def is_mapped(self, name: str) -> bool:
        return False

    def release(self, name: str) -> None:
        pass


def load_module(module: torch.nn.Module, prefix: str, ops: Ops) -> Loader:
    """Return a float32 loader of a module's tensors, whose names begin with ``prefix`` and a dot."""
    tensors = {f"{prefix}.{name}": tensor for name, tensor in module.state_dict().items()}
    return Loader(FloatTensors(tensors), "float32", torch.device("cpu"), ops)  # type: ignore[arg-type]


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
