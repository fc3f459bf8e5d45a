"""`LayerPart`: the part of a linear layer on one rank, and how it is sliced from the checkpoint's tensors."""

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
"""Parts of a weight ``[out, in]`` in floats, or the tensors of `LinearEncoding.pack`."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerPart:
    """The outputs or the inputs of a linear layer on one rank."""

    out_features: int
    """Number of outputs of the whole layer."""
    in_features: int
    """Number of inputs of the whole layer."""
    outputs: tuple[Part, ...] = ()
    """The outputs of this rank, in order; empty for all."""
    inputs: Part | None = None
    """The inputs of this rank; None for all."""

    @property
    def size(self) -> int:
        """Number of outputs of this rank."""
        return sum(part.size for part in self.outputs) if self.outputs else self.out_features

    @property
    def num_inputs(self) -> int:
        """Number of inputs of this rank."""
        return self.in_features if self.inputs is None else self.inputs.size

    def of_weight(self, weight: Tensor) -> list[Tensor]:
        """Return the parts of ``weight [out, in]``, as views."""
        if self.inputs is not None:
            weight = weight[:, self.inputs.start : self.inputs.stop]
        return self.of_rows(weight)

    def of_rows(self, rows: Tensor) -> list[Tensor]:
        """Return the parts of a tensor with one row for each output, as views."""
        return [rows[part.start : part.stop] for part in self.outputs] if self.outputs else [rows]

    def of_encoded(self, name: str, encoding: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the part of a weight in an encoding, from the tensors of `LinearEncoding.pack`.

        Args:
            name: the name of the layer, for the error.
            encoding: the encoding.
            tensors: the whole weight.

        Raises:
            ConfigError: the part would cut a group of inputs that share a scale.
        """
        if not self.outputs and self.inputs is None:
            return tensors
        if self.inputs is not None:
            kind = encoding_named(encoding)
            tensors = kind.select_inputs(name, tensors, self.inputs.start, self.inputs.stop)
        return {key: joined(self.of_rows(tensor)) for key, tensor in tensors.items()}


def inner_dimension_part(
    shard: Shard, source: TensorSource, encoding: LinearEncoding, name: str, size: int
) -> Part:
    """Return a rank's part of the dimension between two linear layers, such as those of an MLP.

    The part does not cut groups of inputs of the second layer that share a scale.

    Args:
        shard: the rank.
        source: where the second layer is stored.
        encoding: the encoding of the model.
        name: the name of the second layer, which is row-parallel.
        size: the whole dimension.

    Raises:
        ConfigError: there are fewer groups than ranks.
    """
    stored = source.stored_encoding(f"{name}.weight")
    unit = (encoding if stored is None else encoding_named(stored)).divisible_inputs or 1
    if stored is None and size < unit * shard.world:
        unit = 1  # the weight is packed after it is cut
    return shard.part(size, f"inputs of {name}", unit)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors concatenated along the first dimension; a single tensor is returned unchanged."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].is_meta:  # torch.cat of meta tensors imports torch._dynamo
        rows = sum(len(part) for part in parts)
        return torch.empty((rows, *parts[0].shape[1:]), dtype=parts[0].dtype, device="meta")
    return torch.cat(tuple(parts))


def common_encoding(source: TensorSource, parts: Mapping[str, LayerPart], floats: str) -> str | None:
    """Return the encoding in which all layers are stored; None if they differ or are floats.

    The result is also None if the layers store their inputs in different orders, or if permuted inputs would
    have to be sliced.

    Args:
        source: where the layers are stored.
        parts: their parts by name.
        floats: the type to which layers that differ are dequantized, for the log message.
    """
    stored = {source.stored_encoding(f"{name}.weight") for name in parts}
    orders = {source.input_order(f"{name}.weight") for name in parts}
    problem = None
    if len(stored) > 1:
        problem = (
            f"form one layer but are stored as {' and '.join(sorted(one or 'floats' for one in stored))}"
        )
    elif len(orders) > 1:
        problem = "form one layer but are stored with inputs in different orders (desc_act)"
    elif orders != {b""} and any(part.inputs is not None for part in parts.values()):
        problem = "are stored with permuted inputs (desc_act), which ranks cannot divide"
    if problem is not None:
        _logger.warning("%s %s: they are dequantized to %s", ", ".join(parts), problem, floats)
        return None
    return stored.pop()


def order_of(source: TensorSource, parts: Iterable[str], encoding: str) -> Tensor | None:
    """Return the stored order of the inputs of a layer, ``[in]`` int32.

    Args:
        source: where the layer is stored.
        parts: the names of its parts.
        encoding: the encoding of the layer. A part that is stored in another one is converted.

    Returns:
        The order, which all parts share; None if the inputs are in their original order.
    """
    weights = [f"{name}.weight" for name in parts]
    found = [source.input_order(weight) for weight in weights if source.stored_encoding(weight) == encoding]
    order = found[0] if found else b""
    assert not order or (set(found) == {order} and len(found) == len(weights)), "parts of different orders"
    return torch.frombuffer(bytearray(order), dtype=torch.int32) if order else None


def read_parts(
    source: TensorSource, parts: Mapping[str, LayerPart], encoding: str, *, transposed: bool
) -> WeightContent:
    """Return the floats of all parts, or their packed rows if the source stores any part in the encoding.

    In that case the other parts are packed here.
    """
    found = [_read_part(source, name, part, encoding, transposed) for name, part in parts.items()]
    floats = [piece for one in found if not isinstance(one, Mapping) for piece in one]
    if not any(isinstance(one, Mapping) for one in found):
        return floats
    pack = encoding_named(encoding).pack
    rows = [one if isinstance(one, Mapping) else pack(joined(one)) for one in found]
    return {key: torch.cat([part[key] for part in rows]) for key in rows[0]}


def _read_part(
    source: TensorSource, name: str, part: LayerPart, encoding: str, transposed: bool
) -> WeightContent:
    """Return the packed rows of a weight if they are stored in the encoding, otherwise its floats."""
    weight, shape = f"{name}.weight", (part.out_features, part.in_features)
    if part.outputs and not transposed and not source.is_mapped(weight):
        return _read_rows(source, name, part, encoding)
    if source.stored_encoding(weight) == encoding:
        stored, tensors = source.read_linear(weight, shape, transposed=transposed)
        if stored == encoding:
            return part.of_encoded(name, encoding, tensors)
        return part.of_weight(tensors["weight"])
    floats = source.tensor(weight, shape[::-1] if transposed else shape)
    return part.of_weight(floats.T if transposed else floats)


def _read_rows(source: TensorSource, name: str, part: LayerPart, encoding: str) -> WeightContent:
    """Like `_read_part`, but reads only some outputs, of a weight that is not mapped."""
    shape = (part.out_features, part.in_features)
    found = [source.rows(f"{name}.weight", shape, output.start, output.stop) for output in part.outputs]
    stored = found[0][0]
    if stored is not None and stored == encoding:
        return {key: joined([rows[key] for _, rows in found]) for key in found[0][1]}
    if stored is not None:
        order = order_of(source, [name], stored)
        weights = [encoding_named(stored).unpack(rows) for _, rows in found]
        return weights if order is None else [weight[:, order.argsort()] for weight in weights]
    return [rows["weight"] for _, rows in found]
