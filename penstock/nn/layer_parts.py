"""`LayerPart`: the part of a linear layer on one rank, and functions that read it from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.distributed import Part, Shard
from penstock.kernels import LinearEncoding, encoding_named
from penstock.nn.tensor_source import TensorSource

WeightContent = Sequence[Tensor] | Mapping[str, Tensor]
"""A weight ``[out, in]``: float tensors to concatenate along ``out``, or tensors of `LinearEncoding.pack`."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerPart:
    """The outputs and inputs of a linear layer that one rank stores."""

    out_features: int
    """Number of outputs of the whole layer."""
    in_features: int
    """Number of inputs of the whole layer."""
    outputs: tuple[Part, ...] = ()
    """The outputs of this rank, in order; empty for all outputs."""
    inputs: Part | None = None
    """The inputs of this rank; None for all inputs."""

    @property
    def num_outputs(self) -> int:
        """Number of outputs of this rank."""
        return sum(part.size for part in self.outputs) if self.outputs else self.out_features

    @property
    def num_inputs(self) -> int:
        """Number of inputs of this rank."""
        return self.in_features if self.inputs is None else self.inputs.size

    def slice_weight(self, weight: Tensor) -> list[Tensor]:
        """Return this rank's part of ``weight [out, in]`` as views, one for each range of outputs."""
        if self.inputs is not None:
            weight = weight[:, self.inputs.start : self.inputs.stop]
        return self.slice_rows(weight)

    def slice_rows(self, rows: Tensor) -> list[Tensor]:
        """Return this rank's rows of a tensor ``[out, ...]`` as views, one for each range of outputs."""
        return [rows[part.start : part.stop] for part in self.outputs] if self.outputs else [rows]

    def slice_encoded(self, name: str, encoding: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this rank's part of a quantized weight.

        Args:
            name: the name of the layer, for the error message.
            encoding: the encoding of the weight.
            tensors: the whole weight, as the tensors of `LinearEncoding.pack`.

        Raises:
            ConfigError: the part would divide a group of inputs that share a scale.
        """
        if not self.outputs and self.inputs is None:
            return tensors
        if self.inputs is not None:
            linear_encoding = encoding_named(encoding)
            tensors = linear_encoding.select_inputs(name, tensors, self.inputs.start, self.inputs.stop)
        return {key: concatenated(self.slice_rows(tensor)) for key, tensor in tensors.items()}


def shard_inner_dim(
    shard: Shard, source: TensorSource, encoding: LinearEncoding, name: str, size: int
) -> Part:
    """Return a rank's part of the dimension between a column-parallel and a row-parallel layer.

    Inputs of the row-parallel layer that share a stored quantization scale stay on one rank.

    Args:
        shard: the rank.
        source: the tensors of the checkpoint.
        encoding: the encoding of the model.
        name: the name of the row-parallel layer.
        size: the size of the whole dimension.

    Raises:
        ConfigError: the inputs can be divided into fewer parts than there are ranks.
    """
    stored_encoding = source.stored_encoding(f"{name}.weight")
    group_size = (encoding if stored_encoding is None else encoding_named(stored_encoding)).split_unit or 1
    if stored_encoding is None and size < group_size * shard.world_size:
        group_size = 1  # float weights can be divided anywhere, because they are packed after the division
    return shard.part(size, f"inputs of {name}", group_size)


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors concatenated along the first dimension; a single tensor is returned unchanged."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].is_meta:  # torch.cat of meta tensors imports torch._dynamo
        rows = sum(len(part) for part in parts)
        return torch.empty((rows, *parts[0].shape[1:]), dtype=parts[0].dtype, device="meta")
    return torch.cat(tuple(parts))


def common_encoding(source: TensorSource, parts: Mapping[str, LayerPart], float_type: str) -> str | None:
    """Return the encoding in which all layers of ``parts`` are stored; None if they are read as floats.

    The result is None if the layers are stored as floats, in different encodings, or with inputs in different
    orders, or if the rank would have to slice permuted inputs. If quantized layers must be dequantized, a
    warning is logged.

    Args:
        source: the tensors of the checkpoint.
        parts: the parts of the layers on this rank, by layer name.
        float_type: the element type of dequantized layers, for the log message.
    """
    encodings = {source.stored_encoding(f"{name}.weight") for name in parts}
    orders = {source.input_order(f"{name}.weight") for name in parts}
    problem = None
    if len(encodings) > 1:
        names = sorted(encoding or "floats" for encoding in encodings)
        problem = f"form one layer but are stored as {' and '.join(names)}"
    elif len(orders) > 1:
        problem = "form one layer but are stored with inputs in different orders (desc_act)"
    elif orders != {b""} and any(part.inputs is not None for part in parts.values()):
        problem = "are stored with permuted inputs (desc_act), which ranks cannot divide"
    if problem is not None:
        _logger.warning("%s %s: they are dequantized to %s", ", ".join(parts), problem, float_type)
        return None
    return encodings.pop()


def stored_input_order(source: TensorSource, layer_names: Iterable[str], encoding: str) -> Tensor | None:
    """Return the order in which the inputs of a fused layer are stored, ``[in]`` int32.

    Args:
        source: the tensors of the checkpoint.
        layer_names: the names of the fused layers.
        encoding: the encoding of the fused layer. Layers that are stored in other encodings are converted and
            have no stored order.

    Returns:
        The common order of all layers; None if the inputs are in their original order.
    """
    weights = [f"{name}.weight" for name in layer_names]
    orders = [source.input_order(weight) for weight in weights if source.stored_encoding(weight) == encoding]
    order = orders[0] if orders else b""
    assert not order or (set(orders) == {order} and len(orders) == len(weights)), (
        "fused layers have different input orders"
    )
    return torch.frombuffer(bytearray(order), dtype=torch.int32) if order else None


def read_parts(
    source: TensorSource, parts: Mapping[str, LayerPart], encoding: str, *, transposed: bool
) -> WeightContent:
    """Return the weight of a fused layer.

    If any of the fused layers is stored in ``encoding``, the other layers are packed, and the result is the
    tensors of `LinearEncoding.pack`. Otherwise the result is the float weights of all layers.
    """
    weights = [_read_part(source, name, part, encoding, transposed) for name, part in parts.items()]
    floats = [rows for weight in weights if not isinstance(weight, Mapping) for rows in weight]
    if not any(isinstance(weight, Mapping) for weight in weights):
        return floats
    pack = encoding_named(encoding).pack
    packed = [weight if isinstance(weight, Mapping) else pack(concatenated(weight)) for weight in weights]
    return {key: torch.cat([tensors[key] for tensors in packed]) for key in packed[0]}


def _read_part(
    source: TensorSource, name: str, part: LayerPart, encoding: str, transposed: bool
) -> WeightContent:
    """Return this rank's part of a weight: packed tensors if it is stored in ``encoding``, else floats."""
    weight, shape = f"{name}.weight", (part.out_features, part.in_features)
    if part.outputs and not transposed and not source.is_mapped(weight):
        return _read_rows(source, name, part, encoding)
    if source.stored_encoding(weight) == encoding:
        stored_encoding, tensors = source.read_linear(weight, shape, transposed=transposed)
        if stored_encoding == encoding:
            return part.slice_encoded(name, encoding, tensors)
        return part.slice_weight(tensors["weight"])
    floats = source.tensor(weight, shape[::-1] if transposed else shape)
    return part.slice_weight(floats.T if transposed else floats)


def _read_rows(source: TensorSource, name: str, part: LayerPart, encoding: str) -> WeightContent:
    """Return the same as `_read_part`, but read only this rank's rows of a file that is not memory-mapped."""
    shape = (part.out_features, part.in_features)
    slices = [source.rows(f"{name}.weight", shape, output.start, output.stop) for output in part.outputs]
    stored_encoding = slices[0][0]
    if stored_encoding is not None and stored_encoding == encoding:
        return {key: concatenated([rows[key] for _, rows in slices]) for key in slices[0][1]}
    if stored_encoding is not None:
        order = stored_input_order(source, [name], stored_encoding)
        weights = [encoding_named(stored_encoding).unpack(rows) for _, rows in slices]
        return weights if order is None else [weight[:, order.argsort()] for weight in weights]
    return [rows["weight"] for _, rows in slices]
