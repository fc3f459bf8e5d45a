"""The operations of all kernel back ends that run here."""

from __future__ import annotations

import os
from functools import cache

from support.on_device import on_device

from penstock.kernels import Ops
from penstock.kernels.backend import BACKENDS
from penstock.kernels.reference import ReferenceOps


@cache
def fast_back_ends() -> dict[str, Ops]:
    """Return all variants besides the reference, by their descriptions, such as ``cpu avx2``."""
    found = {}
    for backend in BACKENDS.backends:
        for ops in backend.variants():
            if type(ops) is ReferenceOps:
                continue
            name = ops.description.replace(" ", "-")
            if "cpu" not in backend.sizes and os.environ.get("TRITON_INTERPRET") != "1":
                ops = on_device(ops, "cuda")
            found[name] = ops
    return found


@cache
def all_back_ends() -> dict[str, Ops]:
    """Return the reference and all other variants."""
    return {"reference": ReferenceOps(), **fast_back_ends()}
