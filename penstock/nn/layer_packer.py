"""`LayerPacker`: packs the layers of a model in the order in which they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from penstock.kernels import LinearSlice, Ops, PackedLinear, encoding_named
from penstock.nn.layer_parts import LayerPart, WeightContent
from penstock.nn.tensor_source import LazyLayers, LoadPacked


class LayerPacker:
    """Packs linear layers, or maps them from a file of packed weights, and lists them in load order.

    Args:
        ops: the operations of the back end that packs.
        device: the device of the layers.
        load_packed: returns a layer from a file of packed weights, or None if the layer must be packed.
            Without such a file, the argument is None.
        lazy: which layers are packed lazily, if the checkpoint is memory-mapped.
    """

    def __init__(
        self, ops: Ops, device: torch.device, load_packed: LoadPacked | None, lazy: LazyLayers
    ) -> None:
        self._ops = ops
        self._device = device
        self._load_packed = load_packed
        self._lazy = lazy
        self.layers: list[PackedLinear] = []
        """All layers so far, packed or mapped, in load order."""
        self.parts: dict[str, LayerPart] = {}
        """The parts of divided layers on this rank, by their names in the checkpoint."""

    def layer(
        self,
        parts: Mapping[str, LayerPart],
        bias: Tensor | None,
        encoding: str,
        read: Callable[[], WeightContent],
        skip: Callable[[], None] = lambda: None,
        *,
        is_mapped: bool = False,
        shape: tuple[int, ...] | None = None,
        order: Tensor | None = None,
    ) -> PackedLinear:
        """Return the next layer, from the file of packed weights or newly packed.

        Args:
            parts: this rank's part of each fused layer, by name, in the order of their outputs.
            bias: ``[out]``.
            encoding: the encoding of the layer.
            read: reads the weight. It is not called if the layer comes from a file of packed weights.
            skip: checks the weight without reading it. It is called if ``read`` is not called.
            is_mapped: whether the weight is a view of the mapped checkpoint, so that packing can be deferred.
            shape: ``(out, in)`` of this rank's layer; by default the outputs of all ``parts`` and the inputs
                of the first part.
            order: ``[in]``, the `PackedLinear.order` of a weight that the checkpoint stores in ``encoding``.
        """
        slices, start = [], 0
        for name, part in parts.items():
            slices.append(LinearSlice(name, start, start + part.num_outputs))
            start += part.num_outputs
            if part.outputs or part.inputs is not None:
                self.parts[name] = part
        out_features, in_features = shape or (start, next(iter(parts.values())).num_inputs)
        if bias is not None:
            bias = bias.to(self._device)
        packed = (
            self._load_packed(encoding, (out_features, in_features), bias, slices)
            if self._load_packed
            else None
        )
        if packed is not None:
            skip()
        else:
            is_deferred = is_mapped and self._is_deferred(encoding)
            packed = self._pack(read(), bias, slices, encoding, is_deferred, order)
        self.layers.append(packed)
        return packed

    def _is_deferred(self, encoding: str) -> bool:
        """Return whether mapped weights in this encoding are packed lazily."""
        linear_encoding = encoding_named(encoding)
        if self._lazy == "calibrated":
            return linear_encoding.needs_calibration
        return self._lazy == "all" and linear_encoding.packs_lazily

    def _pack(
        self,
        weight: WeightContent,
        bias: Tensor | None,
        slices: Sequence[LinearSlice],
        encoding: str,
        is_deferred: bool,
        order: Tensor | None,
    ) -> PackedLinear:
        if isinstance(weight, Mapping):
            tensors = {name: tensor.to(self._device) for name, tensor in weight.items()}
            order = order if order is None else order.to(self._device)
            return self._ops.pack_quantized(tensors, encoding, bias=bias, slices=slices, order=order)
        parts = [part.to(self._device) for part in weight]
        pack = self._ops.pack_lazily if is_deferred else self._ops.pack_linear
        return pack(parts, encoding, bias=bias, slices=slices)
