"""The variants of all kernel back ends that this machine can run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from support.on_device import on_device

from penstock.kernels import Ops
from penstock.kernels.backend import BACKENDS
from penstock.kernels.reference import ReferenceOps


@cache
def _variants(*, deterministic: bool = False) -> dict[str, tuple[Ops, bool]]:
    """Return (operations, whether they run on a GPU) of all variants except the reference, by name."""
    variants = {}
    for backend in BACKENDS.backends:
        for ops in backend.variants():
            if type(ops) is ReferenceOps:
                continue
            on_gpu = "cpu" not in backend.default_sizes and os.environ.get("TRITON_INTERPRET") != "1"
            device_ops = on_device(ops, "cuda") if on_gpu else ops
            if on_gpu and deterministic:  # CPU variants are always deterministic
                device_ops.require_determinism()
            variants[ops.description.replace(" ", "-")] = device_ops, on_gpu
    return variants


def fast_back_ends(*, deterministic: bool = False) -> dict[str, Ops]:
    """Return the operations of all variants except the reference, by a name such as ``cpu-avx2``.

    With ``deterministic``, `Ops.require_determinism` was called on the GPU variants.
    """
    return {name: ops for name, (ops, _) in _variants(deterministic=deterministic).items()}


@cache
def all_back_ends(*, deterministic: bool = False) -> dict[str, Ops]:
    """Return the reference operations and the variants of `fast_back_ends`, by name."""
    return {"reference": ReferenceOps(), **fast_back_ends(deterministic=deterministic)}


def back_end_params(back_ends: Mapping[str, Ops]) -> list[Any]:
    """Return the names of back ends as fixture parameters, or a skipped parameter if there are none.

    Names of GPU variants are marked ``gpu``.
    """
    if not back_ends:
        return [pytest.param("none", marks=pytest.mark.skip("no back end is built"))]
    on_gpu = {name for name, (_, on_gpu) in _variants(deterministic=False).items() if on_gpu}
    return [pytest.param(name, marks=pytest.mark.gpu) if name in on_gpu else name for name in back_ends]
