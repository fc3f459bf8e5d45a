"""The reference operations with float activations, as in the CUDA back end."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels import LoRAInputs, encoding_named, unpack_linear
from penstock.kernels.linear import PackedLinear
from penstock.kernels.reference import ReferenceOps


class FloatActivations(ReferenceOps):
    """Operations that multiply float activations by the unpacked weight.

    Only int8 layers quantize the activations, and only if the activations have at most 64 rows.
    """

    def linear(self, x: Tensor, packed: PackedLinear, *, lora: LoRAInputs | None = None) -> Tensor:
        encoding = encoding_named(packed.encoding)
        is_int8 = encoding.number_format == "integer" and encoding.group_size is None
        if encoding.is_float or (is_int8 and len(x) <= 64):
            return super().linear(x, packed, lora=lora)
        y = x.double() @ unpack_linear(packed).double().T
        y = (y if packed.bias is None else y + packed.bias.double()).to(x.dtype)
        return y if lora is None else self._add_lora(y, x, packed, lora)
