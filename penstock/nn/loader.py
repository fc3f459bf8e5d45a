"""Loading of layers: from the tensors of a checkpoint to packed layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from penstock.dtype import DType
from penstock.kernels import LazyWeight, LinearSlice, Ops, PackedLinear, encoding_named
from penstock.kernels.reference import ReferenceOps
from penstock.nn.linear import Linear
from penstock.nn.norm import LayerNorm, RMSNorm
from penstock.nn.tensor_source import TensorSource

_logger = logging.getLogger(__name__)


TakePacked = Callable[[str, tuple[int, int], Tensor | None, Sequence[LinearSlice]], PackedLinear | None]
"""Given encoding, ``(out, in)``, bias and slices, returns the next layer of the load, or None if it was not
packed before."""

Deferred = Literal["none", "calibrated", "all"]
"""Layers whose packing is deferred: none, those that need calibration, or all that can be."""

_Weight = Sequence[Tensor] | Mapping[str, Tensor]
"""Parts of a weight ``[out, in]`` in floats, or the tensors of `LinearEncoding.pack`."""


class Loader:
    """Reads layers by their checkpoint names and packs each once, on one device.

    Args:
        source: where tensors are read from.
        encoding: encoding of the model. Layers may have another one, see `LinearEncoding.for_layer`.
        device: the device of the layers.
        ops: the back end that packs them; the reference back end if not given.
        take_packed: returns layers that were packed before.
        lazy: layers to pack later, if their weights are mapped; see `penstock.kernels.LazyWeight`.
        keep_stored: whether layers keep the encoding in which the checkpoint stores them, and layers of
            floats stay floats. The output head is the exception: `LinearEncoding.for_layer` decides.
        is_uniform: whether all linear layers have the encoding of the model. The output head has the type of
            the activations then.
    """

    def __init__(
        self,
        source: TensorSource,
        encoding: str,
        device: torch.device,
        ops: Ops | None = None,
        take_packed: TakePacked | None = None,
        *,
        lazy: Deferred = "none",
        keep_stored: bool = False,
        is_uniform: bool = False,
    ) -> None:
        self.source = source
        self.encoding = encoding
        self.device = device
        self._kind = encoding_named(encoding)
        self._ops = ops or ReferenceOps()
        self._take_packed = take_packed
        self._lazy = lazy
        self._keep_stored = keep_stored
        self._is_uniform = is_uniform
        self.dtype = self._kind.compute_dtype.to_torch()
        """The type of activations and of all weights that are not packed."""
        self.layers: list[PackedLinear] = []
        """All linear layers read so far, in order."""

    @property
    def linears(self) -> dict[str, PackedLinear]:
        """The layers by their names in the checkpoint. A fused layer has several names."""
        return {part.name: layer for layer in self.layers for part in layer.slices}

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a weight that is not packed: an embedding table, the scale of a norm."""
        return self.source.tensor(name, shape).to(self.device, self.dtype)

    def norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        """Return the RMS norm called ``name``; ``offset`` is added to the stored weights."""
        if not offset:
            return RMSNorm(self.tensor(f"{name}.weight", size), eps)
        weight = self.source.tensor(f"{name}.weight", (size,)).to(self.device)
        return RMSNorm(weight.float() + offset, eps)  # in float32: the sum needs more digits than its terms

    def layer_norm(
        self, name: str, size: int, eps: float, *, bias: bool = True, offset: float = 0.0
    ) -> LayerNorm:
        """Return the layer norm called ``name``; ``offset`` is added to the stored weights."""
        names = [f"{name}.weight", f"{name}.bias"][: 1 + bias]
        weight, *biases = (self.source.tensor(one, (size,)).to(self.device) for one in names)
        if offset:  # in float32: the sum needs more digits than its terms
            weight, biases = weight.float() + offset, [one.float() for one in biases]
        else:
            weight, biases = weight.to(self.dtype), [one.to(self.dtype) for one in biases]
        return LayerNorm(weight, biases[0] if biases else torch.zeros_like(weight), eps)

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
        """Return the linear layer called ``name``; ``transposed`` if its weight is stored ``[in, out]``."""
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
        """Return several layers of one input as one layer; ``parts`` maps their names to output sizes."""
        named = {f"{prefix}.{part}": size for part, size in parts.items()}
        return self._read(named, in_features, bias, is_expert=is_expert)

    def has_separate_values(self, name: str, out_features: int, in_features: int) -> bool:
        """Return whether attention's values cannot be fused with queries and keys.

        This is so if they have another encoding, unless they are already stored in that of the model.
        """
        encoding = self._kind.for_layer("values", out_features, in_features)
        return (
            not (self._keep_stored or self._is_uniform)
            and encoding != self.encoding
            and self.source.stored_encoding(f"{name}.weight") != self.encoding
        )

    def values(self, name: str, out_features: int, in_features: int, *, bias: bool = False) -> Linear:
        """Return the layer of attention's values called ``name``, in the encoding of values."""
        encoding = self._kind.for_layer("values", out_features, in_features)
        return self._read({name: out_features}, in_features, bias, encoding=encoding)

    def table(self, name: str, vocabulary: int, hidden: int, *, tied_head: str | None = None) -> Tensor:
        """Return the embedding table ``[V, E]`` called ``name``.

        A checkpoint that ties the table to the head may store both as ``tied_head`` only.
        """
        weight = f"{name}.weight"
        if tied_head is not None and weight not in self.source and f"{tied_head}.weight" in self.source:
            weight = f"{tied_head}.weight"
        return self.tensor(weight, vocabulary, hidden)

    def head(
        self,
        name: str,
        vocabulary: int,
        hidden: int,
        *,
        tied_to: Tensor | None = None,
        bias: bool = False,
    ) -> Linear:
        """Return the output head.

        Args:
            name: name of the layer in the checkpoint.
            vocabulary: V.
            hidden: E.
            tied_to: the embedding table ``[V, E]``, if the configuration ties the head to it. It is used only
                if the checkpoint has no tensor of the head, because a stored head may differ from the table.
                The head is packed as a copy in both cases.
            bias: whether the head has a bias.
        """
        encoding = self._kind.for_layer("head", vocabulary, hidden)
        if self._is_uniform:
            encoding = self._kind.compute_dtype.value
        parts = {name: vocabulary}
        offset = self.source.tensor(f"{name}.bias", (vocabulary,)) if bias else None
        if tied_to is None or f"{name}.weight" in self.source:
            stored = self.source.stored_encoding(f"{name}.weight") if self._keep_stored else None
            return self._named(parts, hidden, offset, stored or encoding)
        return self._layer(parts, (vocabulary, hidden), offset, encoding, lambda: [tied_to], is_mapped=True)

    def pack(
        self,
        weight: Tensor,
        parts: Mapping[str, int],
        *,
        bias: Tensor | None = None,
        plain: bool = False,
        is_wide: bool = False,
        is_expert: bool = False,
    ) -> Linear:
        """Return the layer of a weight ``[out, in]`` that the caller has read.

        Args:
            weight: floats of any type.
            parts: names and sizes of its outputs, in order. Adapters find the layer by these names.
            bias: ``[out]``.
            plain: whether to keep the weight in the type of the activations, for every encoding.
            is_wide: whether to keep the weight in float32, for activations in float32.
            is_expert: whether the layer is one expert of many.
        """
        out_features, in_features = weight.shape
        if is_wide:
            encoding = DType.float32.value
        elif plain or self._keep_stored:
            encoding = self._kind.compute_dtype.value
        elif self._is_uniform:
            encoding = self.encoding
        else:
            encoding = self._kind.for_layer("expert" if is_expert else "linear", out_features, in_features)
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
        offset: Tensor | None = None
        if biases and biases[0].is_meta:  # torch.cat of meta tensors imports torch._dynamo
            offset = torch.empty(sum(parts.values()), dtype=biases[0].dtype, device="meta")
        elif biases:
            offset = torch.cat(biases)
        encoding = encoding or self.encoding
        if self._keep_stored:
            encoding = self._common_encoding(parts) or self._kind.compute_dtype.value
        elif not self._is_uniform and not any(
            self.source.stored_encoding(f"{name}.weight") == encoding for name in parts
        ):
            role: Literal["expert", "linear"] = "expert" if is_expert else "linear"
            encoding = encoding_named(encoding).for_layer(role, sum(parts.values()), in_features)
        return self._named(parts, in_features, offset, encoding, transposed=transposed)

    def _common_encoding(self, parts: Iterable[str]) -> str | None:
        """Return the encoding in which all parts are stored; None if they differ or are floats."""
        stored = {self.source.stored_encoding(f"{name}.weight") for name in parts}
        if len(stored) > 1:
            _logger.warning(
                "%s are one layer but stored as %s: they are widened to %s",
                ", ".join(parts),
                " and ".join(sorted(name or "floats" for name in stored)),
                self._kind.compute_dtype.value,
            )
        return stored.pop() if len(stored) == 1 else None

    def _named(
        self,
        parts: Mapping[str, int],
        in_features: int,
        bias: Tensor | None,
        encoding: str,
        *,
        transposed: bool = False,
    ) -> Linear:
        """Return a layer whose weight the source stores under the names of its parts."""

        def read() -> _Weight:
            return self._read_parts(parts, in_features, encoding, transposed)

        def skip() -> None:
            for name, size in parts.items():
                shape = (in_features, size) if transposed else (size, in_features)
                self.source.expect(f"{name}.weight", shape)

        def release() -> None:
            for name in parts:
                self.source.release(f"{name}.weight")

        shape = (sum(parts.values()), in_features)
        is_mapped = all(self.source.is_mapped(f"{name}.weight") for name in parts)
        linear = self._layer(parts, shape, bias, encoding, read, skip, is_mapped=is_mapped)
        tensors = linear.packed.tensors
        if isinstance(tensors, LazyWeight):
            tensors.release = release
        else:
            release()
        return linear

    def _read_parts(
        self, parts: Mapping[str, int], in_features: int, encoding: str, transposed: bool
    ) -> _Weight:
        """Return the floats of all parts, or their packed rows if the source stores any part in the encoding.

        In the second case the other parts are packed here.
        """
        found = [
            self._read_part(f"{name}.weight", (size, in_features), encoding, transposed)
            for name, size in parts.items()
        ]
        floats = [part for part in found if isinstance(part, Tensor)]
        if len(floats) == len(found):
            return floats
        pack = encoding_named(encoding).pack
        rows = [pack(part) if isinstance(part, Tensor) else part for part in found]
        return {key: torch.cat([part[key] for part in rows]) for key in rows[0]}

    def _read_part(
        self, name: str, shape: tuple[int, int], encoding: str, transposed: bool
    ) -> Tensor | Mapping[str, Tensor]:
        """Return the packed rows of a weight if they are stored in the encoding, otherwise its floats."""
        if self.source.stored_encoding(name) == encoding:
            stored, tensors = self.source.read_linear(name, shape, transposed=transposed)
            return tensors if stored == encoding else tensors["weight"]
        floats = self.source.tensor(name, shape[::-1] if transposed else shape)
        return floats.T if transposed else floats

    def _layer(
        self,
        parts: Mapping[str, int],
        shape: tuple[int, int],  # [out, in]
        bias: Tensor | None,
        encoding: str,
        read: Callable[[], _Weight],
        skip: Callable[[], None] = lambda: None,
        *,
        is_mapped: bool = False,
    ) -> Linear:
        """Return the next layer of the load.

        Args:
            parts: names and sizes of the outputs, in order.
            shape: ``(out, in)``.
            bias: ``[out]``.
            encoding: the encoding of the layer.
            read: reads the weight. It is not called if the layer was packed before.
            skip: called instead of ``read``, to check the weight without reading it.
            is_mapped: whether the weight stays in memory after the load, so that packing can be deferred.
        """
        slices, start = [], 0
        for name, size in parts.items():
            slices.append(LinearSlice(name, start, start + size))
            start += size
        if bias is not None:
            bias = bias.to(self.device)
        packed = self._take_packed(encoding, shape, bias, slices) if self._take_packed else None
        if packed is not None:
            skip()
        else:
            packed = self._pack(read(), bias, slices, encoding, is_mapped and self._is_deferred(encoding))
        self.layers.append(packed)
        return Linear(packed)

    def _is_deferred(self, encoding: str) -> bool:
        """Return whether mapped weights in this encoding are packed later."""
        kind = encoding_named(encoding)
        return (
            kind.needs_calibration
            if self._lazy == "calibrated"
            else self._lazy == "all" and kind.packs_lazily
        )

    def _pack(
        self,
        weight: _Weight,
        bias: Tensor | None,
        slices: Sequence[LinearSlice],
        encoding: str,
        is_deferred: bool,
    ) -> PackedLinear:
        if isinstance(weight, Mapping):
            rows = {name: tensor.to(self.device) for name, tensor in weight.items()}
            return self._ops.pack_quantized(rows, encoding, bias=bias, slices=slices)
        parts = [part.to(self.device) for part in weight]
        pack = self._ops.pack_lazily if is_deferred else self._ops.pack_linear
        return pack(parts, encoding, bias=bias, slices=slices)
