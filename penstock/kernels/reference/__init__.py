"""Reference back end: it defines the correct result of each operation, in plain torch for any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names
from penstock.kernels.backend import Backend, DefaultSizes

if TYPE_CHECKING:
    from penstock.kernels.reference.ops import ReferenceOps

__all__ = ["BACKEND", "ReferenceOps"]


def _load() -> ReferenceOps:
    from penstock.kernels.reference.ops import ReferenceOps

    return ReferenceOps()


BACKEND = Backend(
    name="reference",
    default_sizes={
        "cpu": DefaultSizes(max_batch_size=32, step_tokens=1024),
        "gpu": DefaultSizes(max_batch_size=256, step_tokens=8192),
    },
    load=_load,
    variants=lambda: [_load()],
    priority=0,
)


if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__ = lazy_names(__name__, {"ReferenceOps": "penstock.kernels.reference.ops"})
