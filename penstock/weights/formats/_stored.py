"""Shared code of the formats with quantized layers: headers with named parts, checks, unpacking of bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import WeightsError
from penstock.weights.formats import CheckpointFormat, Headers, TensorReader
from penstock.weights.safetensors import QuantizedHeader, TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

GROUP_SIZE_MULTIPLE = 32
"""A group must have a multiple of this number of inputs, or all inputs. Other layers are dequantized."""

FLOATS = ("F16", "BF16", "F32")

_IGNORED_PARTS = (
    *("input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "activation_scale"),
    *("output_scale", "k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "prob_output_scale"),
)
"""Tensors that the formats ignore: parameters of quantized activations and KV caches.

The kernels compute the scales of activations from the activations themselves. `penstock.weights.cache_scales`
reads the scales of 8-bit float KV caches.
"""


@dataclass(frozen=True, slots=True)
class LayerHeader(QuantizedHeader):
    """A quantized weight ``[out, in]`` whose parts have names."""

    part_names: tuple[str, ...] = ()
    """The names of `parts`, without the name of the layer."""
    layout: str = ""
    """The storage variant, for formats with several variants."""
    bits: int = 0
    """Number of bits of a stored number."""
    group_shape: tuple[int, int] = (0, 0)
    """Numbers of outputs and inputs that share a scale."""

    def sorted_inputs(self, codes: Tensor) -> Tensor:
        """Return ``codes [out, in]`` with their inputs reordered by `input_order`."""
        import torch

        if not self.input_order:
            return codes
        return codes[:, torch.frombuffer(bytearray(self.input_order), dtype=torch.int32)]

    def part(self, name: str) -> TensorHeader | None:
        """Return the header of a part, or None if the layer does not have it."""
        return dict(zip(self.part_names, self.parts, strict=True)).get(name)

    def read(self, source: TensorReader, name: str) -> Tensor:
        """Return the tensor of a part, which must exist."""
        header = self.part(name)
        assert header is not None
        return source.tensor(header)


class StoredFormat(CheckpointFormat):
    """A format with quantized layers.

    By default the quantized layers keep their encodings, and all other layers stay floats.
    """

    keeps_floats = True

    def model_encoding(self, headers: Headers) -> str | None:
        """Return the encoding that takes the most bytes; None if all quantized layers are dequantized."""
        sizes: dict[str, int] = {}
        for header in headers.values():
            if isinstance(header, QuantizedHeader) and header.encoding is not None:
                sizes[header.encoding] = sizes.get(header.encoding, 0) + header.num_bytes
        return max(sizes, key=lambda name: sizes[name], default=None)


class StoredTensors:
    """The tensors of a checkpoint while a format replaces those of quantized layers by `LayerHeader` records.

    Args:
        stored: name -> header of each stored tensor.
        format_name: the name of the format in messages.
    """

    def __init__(self, stored: Headers, format_name: str) -> None:
        self.remaining = {
            name: header for name, header in stored.items() if not name.endswith(_IGNORED_ENDINGS)
        }
        """The headers by name: stored tensors that no layer has taken yet, and the layers added by `put`."""
        self._format = format_name
        self._files = {name: header.file for name, header in stored.items()}

    def layers(self, part: str, types: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield the layers that have ``part`` in one of ``types``, or in any type if ``types`` is empty."""
        ending = f".{part}"
        for name in [name for name in self.remaining if name.endswith(ending)]:
            if not types or self.remaining[name].type_name in types:
                yield name.removesuffix(ending)

    def peek(self, layer: str, part: str) -> TensorHeader | None:
        """Return the header of a layer's part, or None if it is missing."""
        return self.remaining.get(f"{layer}.{part}")

    def take(self, layer: str, part: str, types: tuple[str, ...], *shapes: tuple[int, ...]) -> TensorHeader:
        """Remove a part of a layer from `remaining` and return its header.

        Args:
            layer: the name of the layer.
            part: the name of the part.
            types: the allowed types.
            *shapes: the allowed shapes; empty for any shape.

        Raises:
            WeightsError: the part is missing, or its type or shape is not allowed.
        """
        header = self.take_optional(layer, part, types, *shapes)
        if header is None:
            raise WeightsError(self._file_of(layer), f"{layer}.{part} is missing")
        return header

    def take_optional(
        self, layer: str, part: str, types: tuple[str, ...], *shapes: tuple[int, ...]
    ) -> TensorHeader | None:
        """Like `take`, but return None for a missing part."""
        header = self.peek(layer, part)
        if header is None:
            return None
        if header.type_name not in types or (shapes and header.shape not in shapes):
            expected = f"{' or '.join(types)} {' or '.join(str(list(shape)) for shape in shapes)}"
            self.refuse(
                layer,
                part,
                f"is {header.type_name} {list(header.shape)} where {self._format} needs {expected}",
            )
        del self.remaining[f"{layer}.{part}"]
        return header

    def refuse(self, layer: str, part: str, problem: str) -> None:
        """Raise a `WeightsError` about a part of a layer."""
        header = self.peek(layer, part)
        file = header.file if header else self._file_of(layer)
        raise WeightsError(file, f"{layer}.{part} {problem}".strip())

    def _file_of(self, layer: str) -> Path:
        """Return the file of a stored tensor of a layer; any file of the checkpoint if the layer has none."""
        files = (file for name, file in self._files.items() if name.startswith(f"{layer}."))
        return next(files, next(iter(self._files.values())))

    def put(
        self,
        layer: str,
        shape: tuple[int, int],
        encoding: str | None,
        parts: Mapping[str, TensorHeader | None],
        *,
        layout: str = "",
        bits: int = 0,
        group_shape: tuple[int, int] = (0, 0),
        input_order: bytes = b"",
    ) -> None:
        """Add the header of a layer's weight ``[out, in]`` to `remaining`.

        ``parts`` are the headers of its stored tensors; None stands for a part that the layer does not have.
        """
        present = {name: part for name, part in parts.items() if part is not None}
        first = next(iter(present.values()))
        self.remaining[f"{layer}.weight"] = LayerHeader(
            first.file,
            self._format,
            shape,
            sum(part.num_bytes for part in present.values()),
            first.stored_name,
            encoding=encoding,
            parts=tuple(present.values()),
            part_names=tuple(present),
            layout=layout,
            bits=bits,
            group_shape=group_shape,
            input_order=input_order,
        )


def scale_group_shape(
    shape: tuple[int, ...], weight: tuple[int, int], block: tuple[int, int]
) -> tuple[int, int] | None:
    """Return the numbers of outputs and inputs that share a scale.

    Args:
        shape: the shape of the scales. The supported shapes have one scale for the whole weight, for each
            output, or for each block.
        weight: ``(out, in)``.
        block: numbers of outputs and inputs of a block.

    Returns:
        ``(outputs, inputs)``; None if the shape is not supported.
    """
    out_features, in_features = weight
    if shape in ((), (1,), (1, 1)):
        return out_features, in_features
    if shape in ((out_features,), (out_features, 1)):
        return 1, in_features
    if all(block) and shape == (-(-out_features // block[0]), -(-in_features // block[1])):
        return block
    return None


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the unsigned numbers that are packed in rows of int32 words, lowest bits first.

    A number may span two words, for instance with 3 bits.

    Args:
        words: int32 ``[rows, words]``.
        bits: number of bits of a number; at most 8.
        count: number of numbers in a row.

    Returns:
        uint8 ``[rows, count]``.
    """
    import torch

    octets = words.contiguous().view(torch.uint8)  # [rows, 4 * words]
    if bits == 8:
        return octets[:, :count]
    if 8 % bits == 0:
        parts = [octets >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=2).flatten(1)[:, :count]
    starts = torch.arange(count) * bits
    wide = torch.nn.functional.pad(octets, (0, 1)).short()
    low, high = wide[:, starts // 8], wide[:, starts // 8 + 1]
    return ((low | high << 8) >> (starts % 8).short() & (1 << bits) - 1).to(torch.uint8)


_IGNORED_ENDINGS = tuple(f".{name}" for name in _IGNORED_PARTS)
