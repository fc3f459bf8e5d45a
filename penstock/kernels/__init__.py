"""Numerics per device: the only package, with ``driver`` and ``engine``, that knows device names."""

from penstock.kernels.inputs import (
    KVCacheInputs,
    KVGroupInputs,
    LayerKV,
    LoRAInputs,
    SamplingInputs,
)
from penstock.kernels.linear import (
    ENCODINGS,
    FloatEncoding,
    LinearEncoding,
    LinearSlice,
    PackedLinear,
    encoding_named,
    pack_linear,
)
from penstock.kernels.ops import OPERATIONS, Activation, Ops
from penstock.kernels.step import StepInputs

__all__ = [
    "ENCODINGS",
    "OPERATIONS",
    "Activation",
    "FloatEncoding",
    "KVCacheInputs",
    "KVGroupInputs",
    "LayerKV",
    "LinearEncoding",
    "LinearSlice",
    "LoRAInputs",
    "Ops",
    "PackedLinear",
    "SamplingInputs",
    "StepInputs",
    "encoding_named",
    "pack_linear",
]
