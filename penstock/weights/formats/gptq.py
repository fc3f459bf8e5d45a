"""gptq: integers of 2, 3, 4 or 8 bits in groups of inputs, with zero points.

A layer ``[out, in]`` is stored transposed:

* ``qweight`` int32 ``[in * bits / 32, out]``: codes along the inputs, the first in the lowest bits. Codes of
  3 bits can span two words.
* ``qzeros`` int32 ``[G, out * bits / 32]``: zero points, packed like ``qweight``, but along the outputs. In
  the first version of the format (``checkpoint_format: gptq``) they are stored minus 1.
* ``scales`` ``[G, out]``.
* ``g_idx`` int32 ``[in]``, optional: the group of each input. With ``desc_act``, inputs are not sorted by
  group. The reader then sorts the inputs by group (`QuantizedHeader.input_order`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, WeightsError
from penstock.weights.formats import Headers, TensorReader, quant_method, quantization_section
from penstock.weights.formats._codes import exact_encoding, find_input_order, read_codes
from penstock.weights.formats._stored import FLOATS, LayerHeader, StoredFormat, StoredTensors, unpack_bits
from penstock.weights.safetensors import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

BITS = (2, 3, 4, 8)
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""Number of bits of a code -> the word in which each code is 1.

Writers of the first version subtract this word from each word of zero points. Adding it restores the zero
points, because the carries of the addition undo the borrows of the subtraction.
"""


class GPTQFormat(StoredFormat):
    """Codes of 2, 3, 4 or 8 bits in groups of inputs, written by GPTQ libraries."""

    name = "gptq"
    quant_methods = ("gptq",)
    kept_encodings = ("uint4", "uint8")
    unread_if_zero = ("*.bias",)  # some writers add biases to all layers

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        return quant_method(config) in self.quant_methods

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        section = quantization_section(config)
        version = section.get("checkpoint_format") or "gptq"
        if version not in ("gptq", "gptq_v2"):
            raise ConfigError(
                "quantization_config.checkpoint_format", f"{version!r} cannot be read: use gptq or gptq_v2"
            )
        tensors = StoredTensors(stored, self.name)
        for layer in tensors.layers("qweight", ("I32",)):
            _take(tensors, layer, section, version)
        return tensors.remaining

    def read_linear(
        self, source: TensorReader, header: TensorHeader
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        if not isinstance(header, LayerHeader):
            return super().read_linear(source, header)
        return _read(source, header)


FORMAT = GPTQFormat()


def _take(tensors: StoredTensors, layer: str, section: Mapping[str, object], version: object) -> None:
    weight, group_index, scales = (tensors.peek(layer, part) for part in ("qweight", "g_idx", "scales"))
    assert weight is not None
    bits = section.get("bits")
    if len(weight.shape) != 2 or 0 in weight.shape or scales is None or len(scales.shape) != 2:
        tensors.refuse(layer, "qweight", "and scales must be matrices")
    assert scales is not None
    rows, outputs = weight.shape
    if group_index is not None and len(group_index.shape) == 1 and group_index.shape[0]:
        bits = rows * 32 // group_index.shape[0]  # can differ from the configuration
    if not isinstance(bits, int) or bits not in BITS or rows * 32 % bits:
        tensors.refuse(layer, "qweight", f"has {bits!r} bits where 2, 3, 4 or 8 can be read")
    assert isinstance(bits, int)
    inputs, num_groups = rows * 32 // bits, scales.shape[0]
    group_size = section.get("group_size")
    if not isinstance(group_size, int) or group_size < 1 or -(-inputs // group_size) != num_groups:
        group_size = -(-inputs // max(num_groups, 1))
    if not num_groups or -(-inputs // group_size) != num_groups:
        tensors.refuse(layer, "scales", f"has {num_groups} groups for {inputs} inputs")
    encoding, input_order = exact_encoding(bits, group_size, inputs), b""
    if section.get("desc_act") and group_index is not None and group_index.shape == (inputs,):
        encoding, input_order = find_input_order(encoding, tensors, layer, "g_idx", group_size, num_groups)
    parts = {
        "weight": tensors.take(layer, "qweight", ("I32",)),
        "scales": tensors.take(layer, "scales", FLOATS, (num_groups, outputs)),
        "zeros": tensors.take(layer, "qzeros", ("I32",), (num_groups, -(-outputs * bits // 32))),
        "input_groups": tensors.take_optional(layer, "g_idx", ("I32",), (inputs,)),
    }
    tensors.put(
        layer,
        (outputs, inputs),
        encoding,
        parts,
        layout=str(version),
        bits=bits,
        group_shape=(1, group_size),
        input_order=input_order,
    )


def _read(source: TensorReader, header: LayerHeader) -> tuple[str | None, Mapping[str, Tensor]]:
    import torch

    (outputs, inputs), bits, group_size = header.shape, header.bits, header.group_shape[1]
    codes = unpack_bits(header.read(source, "weight").T, bits, inputs)
    words, is_version_1 = header.read(source, "zeros"), header.layout == "gptq"
    if is_version_1 and bits in _ONES:
        words = (words.long() + _ONES[bits] & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    zeros = unpack_bits(words, bits, outputs)
    if is_version_1 and bits not in _ONES:
        zeros = zeros + 1 & (1 << bits) - 1
    groups = header.read(source, "input_groups") if header.part("input_groups") else None
    scales = header.read(source, "scales").T.float()
    if groups is not None and torch.equal(groups, torch.arange(inputs, dtype=torch.int32) // group_size):
        groups = None
    if groups is not None and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        raise WeightsError(header.file, f"{header.stored_name}: g_idx refers to groups that do not exist")
    if groups is not None and header.encoding is not None and not header.input_order:
        raise WeightsError(header.file, f"{header.stored_name}: g_idx is not sorted, but desc_act is not set")
    return read_codes(header.encoding, header.sorted_inputs(codes), scales, zeros.T, group_size, groups)
