"""The reference operations without the quantization of activations, as the CUDA back end multiplies."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels import LoRAInputs, encoding_named, unpack_linear
from penstock.kernels.linear import PackedLinear
from penstock.kernels.reference import ReferenceOps


class FloatActivations(ReferenceOps):
    """Multiplies by the unpacked weight. Only up to 64 rows of int8 products are quantized."""

    def linear(self, x: Tensor, packed: PackedLinear, *, lora: LoRAInputs | None = None) -> Tensor:
        kind = encoding_named(packed.encoding)
        is_int8 = kind.numbers == "integer" and kind.group_size is None
        if kind.is_float or (is_int8 and len(x) <= 64):
            return super().linear(x, packed, lora=lora)
        y = x.double() @ unpack_linear(packed).double().T
        y = (y if packed.bias is None else y + packed.bias.double()).to(x.dtype)
        return y if lora is None else self._add_lora(y, x, packed, lora)
