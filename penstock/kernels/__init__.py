"""Numerics per device: the only package, with ``driver`` and ``engine``, that knows device names."""

from penstock.kernels.experts import ClampedSwiGLU, PackedExperts
from penstock.kernels.inputs import (
    KVCacheInputs,
    KVGroupInputs,
    LayerKV,
    LoRAInputs,
    SamplingInputs,
)
from penstock.kernels.lazy_weight import LazyWeight
from penstock.kernels.linear import (
    ENCODINGS,
    FloatEncoding,
    LinearEncoding,
    LinearSlice,
    PackedLinear,
    encoding_named,
    pack_linear,
    unpack_linear,
)
from penstock.kernels.ops import OPERATIONS, Activation, Gating, Ops, Routing
from penstock.kernels.step import StepInputs

__all__ = [
    "ENCODINGS",
    "OPERATIONS",
    "Activation",
    "ClampedSwiGLU",
    "FloatEncoding",
    "Gating",
    "KVCacheInputs",
    "KVGroupInputs",
    "LayerKV",
    "LazyWeight",
    "LinearEncoding",
    "LinearSlice",
    "LoRAInputs",
    "Ops",
    "PackedExperts",
    "PackedLinear",
    "Routing",
    "SamplingInputs",
    "StepInputs",
    "encoding_named",
    "pack_linear",
    "unpack_linear",
]
