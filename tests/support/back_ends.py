"""The operations of all kernel back ends that run here."""

from __future__ import annotations

from functools import cache

from penstock.kernels import Ops
from penstock.kernels.backend import BACKENDS
from penstock.kernels.reference import ReferenceOps


@cache
def fast_back_ends() -> dict[str, Ops]:
    """Return all variants besides the reference, by their descriptions, such as ``cpu avx2``."""
    variants = [ops for backend in BACKENDS.backends for ops in backend.variants()]
    return {ops.description.replace(" ", "-"): ops for ops in variants if type(ops) is not ReferenceOps}


@cache
def all_back_ends() -> dict[str, Ops]:
    """Return the reference and all other variants."""
    return {"reference": ReferenceOps(), **fast_back_ends()}
