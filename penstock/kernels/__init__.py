"""Numerics per device: the only package, with ``driver`` and ``engine``, that knows device names."""

from penstock.kernels.deferred import Deferred
from penstock.kernels.experts import ClampedSwish, PackedExperts
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
    unpack_linear,
)
from penstock.kernels.ops import OPERATIONS, Activation, Gating, Ops, Routing
from penstock.kernels.step import StepInputs

__all__ = [
    "ENCODINGS",
    "OPERATIONS",
    "Activation",
    "ClampedSwish",
    "Deferred",
    "FloatEncoding",
    "Gating",
    "KVCacheInputs",
    "KVGroupInputs",
    "LayerKV",
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
