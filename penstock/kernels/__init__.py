"""Kernels: the operations of a model, and the back ends that compute them.

The public names are loaded on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names

if TYPE_CHECKING:
    from penstock.kernels.activations import XIELU, Activation
    from penstock.kernels.backend import BACKENDS, Backend, BackendRegistry, DefaultSizes
    from penstock.kernels.convolution import PackedConv1d, PackedConvTranspose1d
    from penstock.kernels.device_memory import DeviceMemory
    from penstock.kernels.device_queue import DeviceQueue, HostCopy, SubmittedWork, upload, uploaded_together
    from penstock.kernels.encodings import ENCODINGS, LayerRole, LinearEncoding, encoding_named
    from penstock.kernels.experts import ClampedSwiGLU, PackedExperts
    from penstock.kernels.graph import Graph, GraphCache, GraphCompiler
    from penstock.kernels.inputs import (
        KVCacheInputs,
        KVGroupInputs,
        LayerKV,
        LayerState,
        LoRAInputs,
        SamplingInputs,
        StateInputs,
    )
    from penstock.kernels.lazy_weight import LazyWeight
    from penstock.kernels.linear import LinearSlice, PackedLinear, pack_linear, unpack_linear
    from penstock.kernels.ops import OPERATIONS, Gating, Ops
    from penstock.kernels.routing import Routing, ScoreRouting, SparseMixer
    from penstock.kernels.spans import ImageSpans
    from penstock.kernels.step import StepInputs

__all__ = [
    "BACKENDS",
    "ENCODINGS",
    "OPERATIONS",
    "XIELU",
    "Activation",
    "Backend",
    "BackendRegistry",
    "ClampedSwiGLU",
    "DefaultSizes",
    "DeviceMemory",
    "DeviceQueue",
    "Gating",
    "Graph",
    "GraphCache",
    "GraphCompiler",
    "HostCopy",
    "ImageSpans",
    "KVCacheInputs",
    "KVGroupInputs",
    "LayerKV",
    "LayerRole",
    "LayerState",
    "LazyWeight",
    "LinearEncoding",
    "LinearSlice",
    "LoRAInputs",
    "Ops",
    "PackedConv1d",
    "PackedConvTranspose1d",
    "PackedExperts",
    "PackedLinear",
    "Routing",
    "SamplingInputs",
    "ScoreRouting",
    "SparseMixer",
    "StateInputs",
    "StepInputs",
    "SubmittedWork",
    "encoding_named",
    "pack_linear",
    "unpack_linear",
    "upload",
    "uploaded_together",
]

_NAMES_BY_MODULE = {
    "penstock.kernels.activations": ("XIELU", "Activation"),
    "penstock.kernels.backend": ("BACKENDS", "Backend", "BackendRegistry", "DefaultSizes"),
    "penstock.kernels.convolution": ("PackedConv1d", "PackedConvTranspose1d"),
    "penstock.kernels.device_memory": ("DeviceMemory",),
    "penstock.kernels.device_queue": (
        "DeviceQueue",
        "HostCopy",
        "SubmittedWork",
        "upload",
        "uploaded_together",
    ),
    "penstock.kernels.encodings": ("ENCODINGS", "LayerRole", "LinearEncoding", "encoding_named"),
    "penstock.kernels.experts": ("ClampedSwiGLU", "PackedExperts"),
    "penstock.kernels.graph": ("Graph", "GraphCache", "GraphCompiler"),
    "penstock.kernels.inputs": (
        "KVCacheInputs",
        "KVGroupInputs",
        "LayerKV",
        "LayerState",
        "LoRAInputs",
        "SamplingInputs",
        "StateInputs",
    ),
    "penstock.kernels.lazy_weight": ("LazyWeight",),
    "penstock.kernels.linear": ("LinearSlice", "PackedLinear", "pack_linear", "unpack_linear"),
    "penstock.kernels.ops": ("OPERATIONS", "Gating", "Ops"),
    "penstock.kernels.routing": ("Routing", "ScoreRouting", "SparseMixer"),
    "penstock.kernels.spans": ("ImageSpans",),
    "penstock.kernels.step": ("StepInputs",),
}


if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__ = lazy_names(
        __name__, {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
