"""From the tensors of a checkpoint to packed layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels import LinearSlice, encoding_named, pack_linear
from penstock.nn.linear import Linear
from penstock.nn.norm import RMSNorm


class TensorSource(Protocol):
    """Named tensors, e.g. `penstock.pipelines.weights.Weights`."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor called ``name``, which must have this shape."""
        ...


class Loader:
    """Reads layers by their checkpoint names and packs each once, in one encoding, on one device."""

    def __init__(self, source: TensorSource, encoding: str, device: torch.device) -> None:
        self.source = source
        self.encoding = encoding
        self.device = device
        self.dtype = encoding_named(encoding).compute_dtype.to_torch()
        """The type of activations and of all weights that are not packed."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A weight that is used as it is: an embedding table, a norm's scale."""
        return self.source.tensor(name, shape).to(self.device, self.dtype)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """The norm called ``name``."""
        return RMSNorm(self.tensor(f"{name}.weight", size), eps)

    def linear(self, name: str, out_features: int, in_features: int, *, bias: bool = False) -> Linear:
        """The linear layer called ``name``."""
        return self._pack({name: out_features}, in_features, bias)

    def fused(self, prefix: str, parts: Mapping[str, int], in_features: int, *, bias: bool = False) -> Linear:
        """Several layers of one input as one; ``parts`` maps their names to their output sizes."""
        return self._pack({f"{prefix}.{part}": size for part, size in parts.items()}, in_features, bias)

    def head(self, name: str, vocabulary: int, hidden: int, *, tied_to: Tensor | None = None) -> Linear:
        """The output head, its own or the embedding table ``[V, E]`` once more.

        It stays in the activations' type: of all layers it is the one that quality hangs on most.
        """
        weight = self.tensor(f"{name}.weight", vocabulary, hidden) if tied_to is None else tied_to
        encoding = str(self.dtype).removeprefix("torch.")
        return Linear(pack_linear(weight, encoding, slices=[LinearSlice(name, 0, vocabulary)]))

    def _pack(self, parts: Mapping[str, int], in_features: int, bias: bool) -> Linear:
        weights = [self.source.tensor(f"{name}.weight", (size, in_features)) for name, size in parts.items()]
        biases = [self.source.tensor(f"{name}.bias", (size,)) for name, size in parts.items()] if bias else []
        stops = torch.tensor(list(parts.values())).cumsum(0).tolist()
        slices = [
            LinearSlice(name, stop - size, stop)
            for (name, size), stop in zip(parts.items(), stops, strict=True)
        ]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        packed = pack_linear(
            weight.to(self.device),
            self.encoding,
            bias=torch.cat(biases).to(self.device) if biases else None,
            slices=slices,
        )
        return Linear(packed)
