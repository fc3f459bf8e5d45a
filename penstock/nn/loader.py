"""`Loader`: reads the layers of a model from the tensors of a checkpoint and packs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from penstock.distributed import Part, Shard
from penstock.distributed.shard import sizes
from penstock.dtype import DType
from penstock.kernels import LazyWeight, Ops, PackedLinear, encoding_named
from penstock.kernels.reference import ReferenceOps
from penstock.nn.layer_packer import LayerPacker
from penstock.nn.layer_parts import (
    LayerPart,
    WeightContent,
    common_encoding,
    concatenated,
    read_parts,
    shard_inner_dim,
    stored_input_order,
)
from penstock.nn.linear import Linear
from penstock.nn.norm import LayerNorm, RMSNorm
from penstock.nn.tensor_source import LazyLayers, LoadPacked, TensorSource

_TABLE_CHUNK_ROWS = 8192
"""Number of rows of a quantized table that are dequantized at once."""


class Loader:
    """Reads layers by their checkpoint names and packs each layer once, on one device.

    Args:
        source: the tensors of the checkpoint.
        encoding: the encoding of the model. `LinearEncoding.for_layer` can replace it for a layer.
        device: the device of the layers.
        ops: the back end that packs the layers; by default the reference back end.
        load_packed: returns a layer from a file of packed weights; see `LayerPacker`.
        lazy: which layers are packed lazily if the checkpoint is memory-mapped; see `LazyLayers`.
        keep_stored: whether layers keep their stored encoding, and float layers stay floats. A float output
            head is an exception: `LinearEncoding.for_layer` chooses its encoding.
        is_uniform: whether all linear layers except the output head have the encoding of the model. The head
            then has the type of the activations.
        shard: the rank for which the layers are loaded; by default there is one rank.
        has_adapters: whether LoRA adapters are used. They need layers of the original sizes, so no input is
            repeated (`penstock.nn.outlier_splitting`).
    """

    def __init__(
        self,
        source: TensorSource,
        encoding: str,
        device: torch.device,
        ops: Ops | None = None,
        load_packed: LoadPacked | None = None,
        *,
        lazy: LazyLayers = "none",
        keep_stored: bool = False,
        is_uniform: bool = False,
        shard: Shard | None = None,
        has_adapters: bool = False,
    ) -> None:
        self.source = source
        self.shard = shard or Shard()
        self.encoding = encoding
        self.device = device
        self._model_encoding = encoding_named(encoding)
        self._packer = LayerPacker(ops or ReferenceOps(), device, load_packed, lazy)
        self._keep_stored = keep_stored
        self._is_uniform = is_uniform
        self.dtype = self._model_encoding.compute_dtype.to_torch()
        """The type of the activations and of all weights that are not packed."""
        keeps_layer_sizes = keep_stored or is_uniform or has_adapters or not self.shard.is_whole
        self.max_repeated_inputs = 0 if keeps_layer_sizes else self._model_encoding.max_repeated_inputs
        """Maximum number of repeated inputs of a layer, see `penstock.nn.outlier_splitting`."""
        self.has_experts = False
        """Whether the layers loaded so far include experts."""

    @property
    def layers(self) -> list[PackedLinear]:
        """All linear layers loaded so far, in load order."""
        return self._packer.layers

    @property
    def parts(self) -> Mapping[str, LayerPart]:
        """The parts of divided layers on this rank, by their names in the checkpoint."""
        return self._packer.parts

    @property
    def linears(self) -> dict[str, PackedLinear]:
        """The layers by their names in the checkpoint. A fused layer has several names."""
        return {part.name: layer for layer in self.layers for part in layer.slices}

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a weight that is not packed, such as an embedding table or the scale of a norm."""
        return self.source.tensor(name, shape).to(self.device, self.dtype)

    def number(self, name: str, *shape: int) -> float:
        """Return a tensor of one element as a number; 1 if the source has only the shapes of tensors."""
        tensor = self.source.tensor(name, shape)
        return 1.0 if tensor.is_meta else float(tensor)

    def norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        """Return the RMS norm called ``name``; ``offset`` is added to the stored weights."""
        if not offset:
            return RMSNorm(self.tensor(f"{name}.weight", size), eps)
        weight = self.source.tensor(f"{name}.weight", (size,)).to(self.device).float()
        return RMSNorm(weight + offset, eps)  # in float32, because rounding the sum would lose precision

    def layer_norm(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        bias: bool = True,
        offset: float = 0.0,
        is_float32: bool = False,
    ) -> LayerNorm:
        """Return the layer norm called ``name``; ``offset`` is added to the stored weights."""
        names = [f"{name}.weight", f"{name}.bias"][: 1 + bias]
        dtype = torch.float32 if offset or is_float32 else self.dtype  # rounding sums would lose precision
        weight, *biases = (self.source.tensor(tensor, (size,)).to(self.device, dtype) for tensor in names)
        weight = weight + offset if offset else weight
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
        outputs: Sequence[Part] = (),
        inputs: Part | None = None,
    ) -> Linear:
        """Return the linear layer called ``name``.

        Args:
            name: the name of the layer in the checkpoint.
            out_features: outputs of the whole layer.
            in_features: inputs of the whole layer.
            bias: whether the layer has a bias.
            transposed: whether the weight is stored ``[in, out]``.
            is_expert: whether the layer belongs to an expert. The caller then adds the ranks' partial sums.
            outputs: the outputs of this rank, if the layer is column-parallel.
            inputs: the inputs of this rank, if the layer is row-parallel.
        """
        part = LayerPart(out_features, in_features, tuple(outputs), inputs)
        return self._read({name: part}, bias, transposed=transposed, is_expert=is_expert)

    def fused(
        self,
        prefix: str,
        output_sizes: Mapping[str, int],
        in_features: int,
        *,
        bias: bool = False,
        is_expert: bool = False,
        outputs: Mapping[str, Sequence[Part]] | None = None,
    ) -> Linear:
        """Return several layers with the same input, called ``{prefix}.{name}``, fused into one layer.

        ``outputs`` maps the names of column-parallel layers to this rank's outputs.
        """
        rank_outputs = outputs or {}
        layer_parts = {
            f"{prefix}.{name}": LayerPart(size, in_features, tuple(rank_outputs.get(name, ())))
            for name, size in output_sizes.items()
        }
        return self._read(layer_parts, bias, is_expert=is_expert)

    def rank_outputs(self, outputs: Sequence[Part]) -> Sequence[Part]:
        """Return ``outputs``, or an empty sequence, which means all outputs, if there is only one rank."""
        return () if self.shard.is_whole else outputs

    def inner_part(self, name: str, size: int) -> Part:
        """Return this rank's part of the inputs of the row-parallel layer ``name``; see `shard_inner_dim`."""
        return shard_inner_dim(self.shard, self.source, self._model_encoding, name, size)

    def has_separate_values(self, name: str, out_features: int, in_features: int, *, fused_with: str) -> bool:
        """Return whether the value projection must be a separate layer, not fused with the query projection.

        With ``keep_stored``, it must be separate if the stored encodings or input orders of the two layers
        differ. Without ``keep_stored``, it must be separate if values are not stored in the model's encoding
        and `LinearEncoding.for_layer` chooses another encoding for them; with ``is_uniform``, never.

        Args:
            name: name of the value projection.
            out_features: outputs of the value projection.
            in_features: inputs of the value projection.
            fused_with: name of the query projection.
        """
        stored_encoding = self.source.stored_encoding(f"{name}.weight")
        if self._keep_stored:
            orders = {self.source.input_order(f"{layer}.weight") for layer in (name, fused_with)}
            return stored_encoding != self.source.stored_encoding(f"{fused_with}.weight") or len(orders) > 1
        encoding = self._model_encoding.for_layer("values", out_features, in_features)
        return not self._is_uniform and encoding != self.encoding and stored_encoding != self.encoding

    def values(
        self,
        name: str,
        out_features: int,
        in_features: int,
        *,
        bias: bool = False,
        outputs: Sequence[Part] = (),
    ) -> Linear:
        """Return the value projection ``name`` as a separate layer, see `has_separate_values`."""
        encoding = self._model_encoding.for_layer("values", out_features, in_features)
        part = LayerPart(out_features, in_features, tuple(outputs))
        return self._read({name: part}, bias, encoding=encoding)

    def table(self, name: str, vocab_size: int, hidden: int, *, tied_head: str | None = None) -> Tensor:
        """Return this rank's rows of the embedding table ``[V, E]`` called ``name``.

        With tied weights, a checkpoint may have only the tensor of ``tied_head``.
        """
        weight = f"{name}.weight"
        if tied_head is not None and weight not in self.source and f"{tied_head}.weight" in self.source:
            weight = f"{tied_head}.weight"
        part, shape = self.shard.vocabulary(vocab_size), (vocab_size, hidden)
        if self.source.stored_encoding(weight) is None or part.size <= _TABLE_CHUNK_ROWS:
            return self.source.tensor(weight, shape)[part.start : part.stop].to(self.device, self.dtype)
        # The whole table in float32 could need much more memory than the result.
        rows = torch.empty(part.size, hidden, dtype=self.dtype, device=self.device)
        for start in range(part.start, part.stop, _TABLE_CHUNK_ROWS):
            stop = min(start + _TABLE_CHUNK_ROWS, part.stop)
            encoding, tensors = self.source.rows(weight, shape, start, stop)
            chunk = tensors["weight"] if encoding is None else encoding_named(encoding).unpack(tensors)
            rows[start - part.start : stop - part.start] = chunk
        return rows

    def head(
        self, name: str, vocab_size: int, hidden: int, *, tied_to: Tensor | None = None, bias: bool = False
    ) -> Linear:
        """Return the output head.

        Args:
            name: name of the layer in the checkpoint.
            vocab_size: V.
            hidden: E.
            tied_to: this rank's rows of the embedding table, if the configuration ties the head to it. A
                stored head takes precedence, because it may differ from the table. The packed head is a copy.
            bias: whether the head has a bias.
        """
        encoding = self._model_encoding.for_layer("head", vocab_size, hidden)
        if self._is_uniform:
            encoding = self._model_encoding.compute_dtype.value
        outputs = () if self.shard.is_whole else (self.shard.vocabulary(vocab_size),)
        parts = {name: LayerPart(vocab_size, hidden, outputs)}
        biases = self._biases(parts) if bias else None
        if tied_to is None or f"{name}.weight" in self.source:
            stored_encoding = self.source.stored_encoding(f"{name}.weight") if self._keep_stored else None
            packed = self._pack_stored(parts, biases, stored_encoding or encoding)
        else:
            packed = self._packer.layer(parts, biases, encoding, lambda: [tied_to], is_mapped=True)
        if self.shard.is_whole:
            return Linear(packed)
        widths = sizes(self.shard.vocabulary_parts(vocab_size))
        return Linear(packed, gather_over=self.shard.collectives, widths=widths)

    def pack(
        self,
        weight: Tensor,
        output_sizes: Mapping[str, int],
        *,
        bias: Tensor | None = None,
        is_unquantized: bool = False,
        is_float32: bool = False,
        is_expert: bool = False,
        rank_parts: Mapping[str, LayerPart] | None = None,
    ) -> Linear:
        """Pack a weight ``[out, in]`` that the caller has read, and return the layer.

        Args:
            weight: floats of any type.
            output_sizes: names and output sizes of the fused layers, in order. Adapters use these names.
            bias: ``[out]``.
            is_unquantized: whether to store the weight in the type of the activations, without quantizing it.
            is_float32: whether to store the weight in float32, for activations in float32.
            is_expert: whether the layer belongs to an expert.
            rank_parts: the parts of divided layers on this rank, by the names in ``output_sizes``.
        """
        out_features, in_features = weight.shape
        layer_parts = {name: LayerPart(size, in_features) for name, size in output_sizes.items()}
        if rank_parts:
            layer_parts |= rank_parts
            out_features = sum(part.out_features for part in layer_parts.values())
            in_features = max(part.in_features for part in layer_parts.values())
        if is_float32:
            encoding = DType.float32.value
        elif is_unquantized or self._keep_stored:
            encoding = self._model_encoding.compute_dtype.value
        elif self._is_uniform:
            encoding = self.encoding
        else:
            encoding = self._model_encoding.for_layer(
                "expert" if is_expert else "linear", out_features, in_features
            )
        shape = tuple(weight.shape)
        return Linear(self._packer.layer(layer_parts, bias, encoding, lambda: [weight], shape=shape))

    def expert(
        self,
        name: str,
        out_features: int,
        in_features: int,
        *,
        bias: Tensor | None = None,
        reorder_rows: Callable[[Tensor], Tensor] | None = None,
    ) -> Linear:
        """Return a linear layer of one expert, to which adapters do not apply.

        Args:
            name: name of the layer in the checkpoint.
            out_features: outputs of the layer.
            in_features: inputs of the layer.
            bias: ``[out]``, in the order of the layer's outputs.
            reorder_rows: reorders the stored rows ``[out, ...]`` to the order of the layer's outputs.
        """
        weight, shape = f"{name}.weight", (out_features, in_features)
        encoding = self.encoding
        if self._keep_stored:
            encoding = self.source.stored_encoding(weight) or self._model_encoding.compute_dtype.value
        elif not self._is_uniform and self.source.stored_encoding(weight) != encoding:
            encoding = self._model_encoding.for_layer("expert", out_features, in_features)

        def read() -> WeightContent:
            content = read_parts(self.source, {name: LayerPart(*shape)}, encoding, transposed=False)
            if reorder_rows is None:
                return content
            if isinstance(content, Mapping):
                return {key: reorder_rows(rows) for key, rows in content.items()}
            return [reorder_rows(part) for part in content]

        def skip() -> None:
            self.source.expect(weight, shape)

        order = stored_input_order(self.source, [name], encoding)
        packed = self._packer.layer({}, bias, encoding, read, skip, shape=shape, order=order)
        self.source.release(weight)
        return Linear(packed)

    def _read(
        self,
        parts: Mapping[str, LayerPart],
        bias: bool,
        *,
        transposed: bool = False,
        is_expert: bool = False,
        encoding: str | None = None,
    ) -> Linear:
        first_part = next(iter(parts.values()))
        biases = self._biases(parts) if bias else None
        encoding = encoding or self.encoding
        if self._keep_stored:
            float_type = self._model_encoding.compute_dtype.value
            encoding = common_encoding(self.source, parts, float_type) or float_type
        elif not self._is_uniform and not any(
            self.source.stored_encoding(f"{name}.weight") == encoding for name in parts
        ):
            role: Literal["expert", "linear"] = "expert" if is_expert else "linear"
            out_features = sum(part.out_features for part in parts.values())
            encoding = encoding_named(encoding).for_layer(role, out_features, first_part.in_features)
        packed = self._pack_stored(parts, biases, encoding, transposed=transposed)
        is_partial_sum = first_part.inputs is not None and not is_expert
        return Linear(packed, sum_over=self.shard.collectives if is_partial_sum else None)

    def _biases(self, parts: Mapping[str, LayerPart]) -> Tensor | None:
        """Return the biases of this rank's outputs. Only rank 0 adds the bias of a row-parallel layer."""
        biases = []
        for name, part in parts.items():
            if part.inputs is not None and self.shard.rank:
                self.source.expect(f"{name}.bias", (part.out_features,))
            else:
                biases += part.slice_rows(self.source.tensor(f"{name}.bias", (part.out_features,)))
        return concatenated(biases) if biases else None

    def _pack_stored(
        self,
        parts: Mapping[str, LayerPart],
        bias: Tensor | None,
        encoding: str,
        *,
        transposed: bool = False,
    ) -> PackedLinear:
        """Read the tensors ``{name}.weight`` of the parts and return them as one packed layer."""

        def read() -> WeightContent:
            return read_parts(self.source, parts, encoding, transposed=transposed)

        def skip() -> None:
            for name, part in parts.items():
                shape = (part.out_features, part.in_features)
                self.source.expect(f"{name}.weight", shape[::-1] if transposed else shape)

        def release() -> None:
            for name in parts:
                self.source.release(f"{name}.weight")

        is_mapped = all(self.source.is_mapped(f"{name}.weight") for name in parts)
        order = stored_input_order(self.source, parts, encoding)
        packed = self._packer.layer(parts, bias, encoding, read, skip, is_mapped=is_mapped, order=order)
        if isinstance(packed.tensors, LazyWeight):
            packed.tensors.release = release
        else:
            release()
        return packed
