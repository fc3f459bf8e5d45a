"""mxfp4: blocks of 32 four-bit floats that share an eight-bit scale (OCP Microscaling Formats 1.0).

A number is E2M1: a sign, two bits of exponent, one bit of mantissa. A scale is E8M0: 2^(byte - 127), and NaN
for 255. A byte contains two numbers, the first in its lower half.

A matrix ``x`` is stored as ``x_blocks [out, in / 32, 16]`` and ``x_scales [out, in / 32]``, both uint8. The
model reads it as ``x.weight [out, in]``. The matrices of all experts are stored as one tensor with a leading
dimension. The model reads them as ``x.<expert>.weight [out, in]``. `read_linear` returns the encoding mxfp4,
`read_tensor` returns bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from penstock.dtype import DType
from penstock.errors import WeightsError
from penstock.weights.formats import Headers, TensorReader, quant_method
from penstock.weights.formats._stored import StoredFormat
from penstock.weights.safetensors import QuantizedHeader, TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
"""Number of weights in a block, which share a scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCKS, _SCALES = "_blocks", "_scales"


class MXFP4Format(StoredFormat):
    """Checkpoints with MXFP4 experts and other tensors in floats, such as gpt-oss."""

    name = "mxfp4"
    quant_methods = ("mxfp4",)
    kept_encodings = ("mxfp4",)

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        method = quant_method(config)
        return method in self.quant_methods or (method is None and any(_block_names(headers)))

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        headers = dict(stored)
        for name in list(_block_names(stored)):
            blocks, scales = headers.pop(f"{name}{_BLOCKS}"), headers.pop(f"{name}{_SCALES}", None)
            _check(blocks, scales, name)
            assert scales is not None
            *experts, out_features, num_groups, _ = blocks.shape
            for expert in range(*experts) if experts else (None,):
                headers[f"{name}.weight" if expert is None else f"{name}.{expert}.weight"] = QuantizedHeader(
                    blocks.file,
                    "MXFP4",
                    (out_features, num_groups * BLOCK),
                    (blocks.num_bytes + scales.num_bytes) // (experts[0] if experts else 1),
                    blocks.stored_name,
                    encoding="mxfp4",
                    parts=(blocks, scales),
                    index=expert,
                    float_dtype=DType.bfloat16,
                )
        return headers

    def read_linear(
        self, source: TensorReader, header: TensorHeader
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        if not isinstance(header, QuantizedHeader):
            return super().read_linear(source, header)
        blocks, scales = (source.tensor(part, header.index) for part in header.parts)
        return header.encoding, {"weight": unpack_nibbles(blocks).flatten(1), "scales": scales}

    def read_tensor(self, source: TensorReader, header: TensorHeader) -> Tensor:
        if not isinstance(header, QuantizedHeader):
            return super().read_tensor(source, header)
        return dequantize(*(source.tensor(part, header.index) for part in header.parts))


FORMAT = MXFP4Format()


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the 4-bit numbers ``[..., 2 n]`` in bytes ``[..., n]``, the lower half of each byte first."""
    import torch

    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights stored in ``blocks [..., G, 16]`` with ``scales [..., G]``, both uint8.

    Returns:
        ``[..., 32 G]`` bfloat16. All values are exact unless they exceed the range of bfloat16.
    """
    import torch

    numbers = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
    pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1)  # [256, 2]
    powers = torch.tensor([2.0 ** (scale - 127) for scale in range(255)] + [torch.nan])
    values = pairs[blocks.int()].flatten(-2)  # [..., G, 32] float32
    return values.mul_(powers[scales.int()][..., None]).flatten(-2).bfloat16()


def _block_names(headers: Headers) -> Iterator[str]:
    """Yield the names of the matrices that are stored in blocks, without ``_blocks``."""
    for name, header in headers.items():
        if name.endswith(_BLOCKS) and header.type_name == "U8" and len(header.shape) in (3, 4):
            yield name.removesuffix(_BLOCKS)


def _check(blocks: TensorHeader, scales: TensorHeader | None, name: str) -> None:
    """Check that the types and shapes of blocks and scales are consistent.

    Raises:
        WeightsError: a type or a shape is wrong, or the scales are missing. The message names the tensors.
    """
    faults = []
    if scales is None:
        faults.append(f"{name}{_SCALES} is missing")
    elif scales.type_name != "U8" or scales.shape != blocks.shape[:-1]:
        faults.append(
            f"{name}{_SCALES} is {scales.type_name} {list(scales.shape)} where MXFP4 needs U8 "
            f"{list(blocks.shape[:-1])}"
        )
    if blocks.shape[-1] != BLOCK // 2:
        expected_shape = [*blocks.shape[:-1], BLOCK // 2]
        faults.append(f"{name}{_BLOCKS} is {list(blocks.shape)} where MXFP4 needs {expected_shape}")
    if faults:
        raise WeightsError(blocks.file, "; ".join(faults))
