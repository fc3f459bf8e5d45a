"""From the tensors of a checkpoint to packed layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels import LazyWeight, LinearSlice, PackedLinear, encoding_named
from penstock.kernels.reference import ReferenceOps
from penstock.nn.linear import Linear
from penstock.nn.norm import LayerNorm, RMSNorm


class TensorSource(Protocol):
    """Named tensors, e.g. `penstock.weights.Weights`."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor called ``name``, which must have this shape."""
        ...

    def expect(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether it is there in this shape, without a look at its numbers."""
        ...

    def quantized_rows(
        self, name: str, encoding: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> Mapping[str, Tensor] | None:
        """A linear layer's weight as ``encoding`` stores it in rows, where the source holds just that.

        ``shape`` is ``(out, in)``, also where the source's own is ``transposed``.
        """
        ...

    def is_quantized(self, name: str, encoding: str) -> bool:
        """Whether `quantized_rows` has this tensor's numbers."""
        ...

    def is_mapped(self, name: str) -> bool:
        """Whether `tensor` gives what lies in the file, and takes no memory of its own."""
        ...

    def release(self, name: str) -> None:
        """The tensor has been packed: what memory its file's pages take may go."""
        ...


class PackFloats(Protocol):
    """Packs parts of a weight ``[out, in]``, and ``bias [out]``, in the encoding named."""

    def __call__(
        self,
        weight: Sequence[Tensor],
        encoding: str,
        *,
        bias: Tensor | None,
        slices: Sequence[LinearSlice],
    ) -> PackedLinear: ...


class Packer(Protocol):
    """What packs weights: a back end, `penstock.kernels.Ops`."""

    @property
    def pack_linear(self) -> PackFloats:
        """Packs at once."""
        ...

    @property
    def pack_lazily(self) -> PackFloats:
        """Packs parts that stay in memory by themselves, not necessarily at once."""
        ...

    def pack_quantized(
        self,
        rows: Mapping[str, Tensor],
        encoding: str,
        *,
        bias: Tensor | None,
        slices: Sequence[LinearSlice],
    ) -> PackedLinear:
        """Packs a weight that is in the form of the encoding already."""
        ...


class LayerStore(Protocol):
    """Layers that were packed before."""

    def take(
        self,
        encoding: str,
        shape: tuple[int, int],  # [out, in]
        bias: Tensor | None,
        slices: Sequence[LinearSlice],
    ) -> PackedLinear | None:
        """The next layer of a load, if it is this one; None if it is to be packed."""
        ...


_Weight = Sequence[Tensor] | Mapping[str, Tensor]
"""Parts of a weight ``[out, in]``, or it in the form of its encoding."""

SMALL = 64
"""Inputs, or outputs, below which a layer gains nothing from 4 bits and is packed in 8."""

NARROW = 2048
"""Inputs, or outputs, below which a layer is packed in 5 bits in place of 4: it is of a small model, which
bears 4 badly. One of 135 M parameters loses 15 % of its perplexity to them, and 4 % with a fifth bit."""


def encoding_of_linear(encoding: str, out_features: int, in_features: int, *, is_expert: bool = False) -> str:
    """The encoding of a linear layer of this shape in a model of ``encoding``.

    An expert is narrow where it has few inputs and outputs both: many narrow ones make a large model.
    """
    narrowest, widest = sorted((out_features, in_features))
    if encoding != "int4":
        return encoding
    if narrowest < SMALL:
        return "int8"
    return "int5" if (widest if is_expert else narrowest) < NARROW else encoding


def encoding_of_values(encoding: str) -> str:
    """The encoding of the layer that computes attention's values: its errors reach the residual stream
    unweakened, and with grouped heads it is a hundredth of the weights. A third of what 4 bits cost a trained
    model came from it."""
    return "int8" if encoding == "int4" else encoding


def encoding_of_head(encoding: str) -> str:
    """The encoding of the output head: quality hangs on it most, and 8 bits are the fewest it has."""
    return "int8" if encoding == "int4" else encoding


class Loader:
    """Reads layers by their checkpoint names and packs each once, on one device.

    Args:
        source: where from.
        encoding: that of linear layers, where it suits them: see `encoding_of_linear`, `encoding_of_head`.
        device: where to.
        packer: what packs them there; the reference back end if not given.
        store: where layers may be packed already.
        later: encodings whose weights, where they are mapped, are to be packed later, see
            `penstock.kernels.LazyWeight`.
    """

    def __init__(
        self,
        source: TensorSource,
        encoding: str,
        device: torch.device,
        packer: Packer | None = None,
        store: LayerStore | None = None,
        *,
        later: Collection[str] = (),
    ) -> None:
        self.source = source
        self.encoding = encoding
        self.device = device
        self._packer = packer or ReferenceOps()
        self._store = store
        self._later = later
        self.dtype = encoding_named(encoding).compute_dtype.to_torch()
        """The type of activations and of all weights that are not packed."""
        self.layers: list[PackedLinear] = []
        """All linear layers read so far, in order."""

    @property
    def linears(self) -> dict[str, PackedLinear]:
        """The layers by their names in the checkpoint; a fused one under each name."""
        return {part.name: layer for layer in self.layers for part in layer.slices}

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A weight that is used as it is: an embedding table, a norm's scale."""
        return self.source.tensor(name, shape).to(self.device, self.dtype)

    def norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        """The norm called ``name``; ``offset`` is what the checkpoint's weights are stored less of."""
        if not offset:
            return RMSNorm(self.tensor(f"{name}.weight", size), eps)
        weight = self.source.tensor(f"{name}.weight", (size,)).to(self.device)
        return RMSNorm(weight.float() + offset, eps)  # in float32: the sum has more digits than either

    def layer_norm(self, name: str, size: int, eps: float) -> LayerNorm:
        """The norm with a mean and a bias called ``name``."""
        return LayerNorm(self.tensor(f"{name}.weight", size), self.tensor(f"{name}.bias", size), eps)

    def linear(
        self,
        name: str,
        out_features: int,
        in_features: int,
        *,
        bias: bool = False,
        transposed: bool = False,
        is_expert: bool = False,
    ) -> Linear:
        """The linear layer called ``name``; ``transposed`` where its weight is stored ``[in, out]``."""
        return self._read({name: out_features}, in_features, bias, transposed=transposed, is_expert=is_expert)

    def fused(
        self,
        prefix: str,
        parts: Mapping[str, int],
        in_features: int,
        *,
        bias: bool = False,
        is_expert: bool = False,
    ) -> Linear:
        """Several layers of one input as one; ``parts`` maps their names to their output sizes."""
        named = {f"{prefix}.{part}": size for part, size in parts.items()}
        return self._read(named, in_features, bias, is_expert=is_expert)

    def has_separate_values(self, name: str) -> bool:
        """Whether the layer of values called ``name`` cannot be fused with those of queries and keys: it has
        another encoding, unless the source is quantised in theirs already."""
        weight = f"{name}.weight"
        return encoding_of_values(self.encoding) != self.encoding and not (
            self.source.is_quantized(weight, self.encoding)
        )

    def values(self, name: str, out_features: int, in_features: int, *, bias: bool = False) -> Linear:
        """The layer of attention's values called ``name``, in the encoding they have for themselves."""
        return self._read({name: out_features}, in_features, bias, encoding=encoding_of_values(self.encoding))

    def table(self, name: str, vocabulary: int, hidden: int, *, tied_head: str | None = None) -> Tensor:
        """Return the embedding table ``[V, E]`` called ``name``.

        A checkpoint that ties table and head may hold them as ``tied_head`` alone.
        """
        weight = f"{name}.weight"
        if tied_head is not None and weight not in self.source and f"{tied_head}.weight" in self.source:
            weight = f"{tied_head}.weight"
        return self.tensor(weight, vocabulary, hidden)

    def head(self, name: str, vocabulary: int, hidden: int, *, tied_to: Tensor | None = None) -> Linear:
        """Return the output head.

        Args:
            name: of the layer in the checkpoint.
            vocabulary: V.
            hidden: E.
            tied_to: the embedding table ``[V, E]``, for a configuration that ties the head to it. It is used
                if the checkpoint has no tensor of the head. A tensor that is there may differ from the table;
                if it does not, nothing is lost: the head is packed beside the table in any case.
        """
        encoding = encoding_of_head(self.encoding)
        parts = {name: vocabulary}
        if tied_to is None or f"{name}.weight" in self.source:
            return self._named(parts, hidden, None, encoding)
        return self._layer(parts, (vocabulary, hidden), None, encoding, lambda: [tied_to], later=True)

    def pack(
        self,
        weight: Tensor,
        parts: Mapping[str, int],
        *,
        bias: Tensor | None = None,
        plain: bool = False,
        is_expert: bool = False,
    ) -> Linear:
        """A weight ``[out, in]`` that the caller has read.

        Args:
            weight: in the type it is stored in.
            parts: names of its outputs and their sizes, in order: where an adapter finds its place.
            bias: ``[out]``.
            plain: whether it stays in the activations' type, whatever the encoding.
            is_expert: whether it is of one expert of many.
        """
        if plain:
            encoding = str(self.dtype).removeprefix("torch.")
        else:
            encoding = encoding_of_linear(self.encoding, *weight.shape, is_expert=is_expert)
        out_features, in_features = weight.shape
        return self._layer(parts, (out_features, in_features), bias, encoding, lambda: [weight])

    def _read(
        self,
        parts: Mapping[str, int],
        in_features: int,
        bias: bool,
        *,
        transposed: bool = False,
        is_expert: bool = False,
        encoding: str | None = None,
    ) -> Linear:
        biases = [self.source.tensor(f"{name}.bias", (size,)) for name, size in parts.items()] if bias else []
        offset = torch.cat(biases) if biases else None
        encoding = encoding or self.encoding
        if not any(self.source.is_quantized(f"{name}.weight", encoding) for name in parts):
            out_features = sum(parts.values())
            encoding = encoding_of_linear(encoding, out_features, in_features, is_expert=is_expert)
        return self._named(parts, in_features, offset, encoding, transposed=transposed)

    def _named(
        self,
        parts: Mapping[str, int],
        in_features: int,
        bias: Tensor | None,
        encoding: str,
        *,
        transposed: bool = False,
    ) -> Linear:
        """A layer whose weight the source holds, in parts called so."""

        def read() -> _Weight:
            return self._quantized(parts, in_features, encoding, transposed) or [
                self._weight(name, size, in_features, transposed) for name, size in parts.items()
            ]

        def skip() -> None:
            for name, size in parts.items():
                shape = (in_features, size) if transposed else (size, in_features)
                self.source.expect(f"{name}.weight", shape)

        def release() -> None:
            for name in parts:
                self.source.release(f"{name}.weight")

        shape = (sum(parts.values()), in_features)
        later = all(self.source.is_mapped(f"{name}.weight") for name in parts)
        linear = self._layer(parts, shape, bias, encoding, read, skip, later=later)
        tensors = linear.packed.tensors
        if isinstance(tensors, LazyWeight):
            tensors.release = release
        else:
            release()
        return linear

    def _weight(self, name: str, out_features: int, in_features: int, transposed: bool) -> Tensor:
        if transposed:
            return self.source.tensor(f"{name}.weight", (in_features, out_features)).T
        return self.source.tensor(f"{name}.weight", (out_features, in_features))

    def _quantized(
        self, parts: Mapping[str, int], in_features: int, encoding: str, transposed: bool
    ) -> Mapping[str, Tensor] | None:
        """The rows of all parts as the encoding stores them, if the source holds any of them so; others are
        quantised."""
        found = {
            name: self.source.quantized_rows(
                f"{name}.weight", encoding, (size, in_features), transposed=transposed
            )
            for name, size in parts.items()
        }
        if not any(found.values()):
            return None
        pack = encoding_named(encoding).pack
        whole = [
            rows or pack(self._weight(name, parts[name], in_features, transposed))
            for name, rows in found.items()
        ]
        return {key: torch.cat([rows[key] for rows in whole]) for key in whole[0]}

    def _layer(
        self,
        parts: Mapping[str, int],
        shape: tuple[int, int],  # [out, in]
        bias: Tensor | None,
        encoding: str,
        read: Callable[[], _Weight],
        skip: Callable[[], None] = lambda: None,
        *,
        later: bool = False,
    ) -> Linear:
        """The next layer of the load: as it was packed before, or packed from what ``read`` gives.

        Reading may take long, where a file is quantised in another way; ``skip`` is called in its place. What
        stays in memory anyway may be packed ``later``.
        """
        slices, start = [], 0
        for name, size in parts.items():
            slices.append(LinearSlice(name, start, start + size))
            start += size
        if bias is not None:
            bias = bias.to(self.device)
        packed = self._store.take(encoding, shape, bias, slices) if self._store else None
        if packed is not None:
            skip()
        else:
            packed = self._packed(read(), bias, slices, encoding, later and encoding in self._later)
        self.layers.append(packed)
        return Linear(packed)

    def _packed(
        self,
        weight: _Weight,
        bias: Tensor | None,
        slices: Sequence[LinearSlice],
        encoding: str,
        later: bool,
    ) -> PackedLinear:
        if isinstance(weight, Mapping):
            rows = {name: tensor.to(self.device) for name, tensor in weight.items()}
            return self._packer.pack_quantized(rows, encoding, bias=bias, slices=slices)
        parts = [part.to(self.device) for part in weight]
        pack = self._packer.pack_lazily if later else self._packer.pack_linear
        return pack(parts, encoding, bias=bias, slices=slices)
