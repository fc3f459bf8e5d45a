"""Penstock on Ray: a replicated server on Ray Serve, and generation and embedding of datasets on Ray Data.

    >>> from penstock.ray import RayConfig
    >>> RayConfig(ray_max_replicas=4).ray_min_replicas
    1

Importing this module does not import Ray. The functions require the extra ``penstock-llm[ray]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names

if TYPE_CHECKING:
    from penstock.ray.config import RayConfig
    from penstock.ray.dataset import embed, generate
    from penstock.ray.online import build_app

__all__ = ["RayConfig", "build_app", "embed", "generate"]

_MODULES = {
    "RayConfig": "penstock.ray.config",
    "build_app": "penstock.ray.online",
    "embed": "penstock.ray.dataset",
    "generate": "penstock.ray.dataset",
}


if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
