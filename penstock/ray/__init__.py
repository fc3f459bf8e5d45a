"""Penstock on Ray: a server of replicas on Ray Serve, and generation and embedding of datasets on Ray Data.

    >>> from penstock.ray import RayConfig
    >>> RayConfig(ray_max_replicas=4).ray_min_replicas
    1

Importing this module does not import Ray. The functions need the extra ``ray``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.ray.config import RayConfig
    from penstock.ray.dataset import embed, generate
    from penstock.ray.online import build_app

__all__ = ["RayConfig", "build_app", "embed", "generate"]

_MODULES = {"RayConfig": "config", "build_app": "online", "embed": "dataset", "generate": "dataset"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
