"""Lazy names of a package: imported on first use, so that importing the package is cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(module: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module, which imports a name on its first use.

    Args:
        module: the name of the module.
        modules: name -> the module that defines the name.
    """

    def __getattr__(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return __getattr__
